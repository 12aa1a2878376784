// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "named_cases.h"
#include "problem.h"

namespace kernel_tests {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One of each, a head: what comes of a row that sees keys is in the same place of Row.
float const kSinks[] = {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity, 2.0f};
constexpr int kHeads = 4;

bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : a == b; }

// The second batch has no key.
Problem problemOf(FlashDtype dtype, float softcap) {
  Problem p;
  p.dtype = dtype;
  p.softcap = softcap;
  p.batch = 2;
  p.heads_q = p.heads_kv = kHeads;
  p.seqlen_q = 3;
  p.seqlen_kv = 150;
  p.kv_lengths = {150, 0};
  return p;
}

std::string wrongRow(Tensors const& tensors, Tensors const& without_sinks, int b, int h, int row) {
  double const output = tensors.output(b, h, row, 9);
  float const lse = tensors.lse(b, h, row), sink = kSinks[h];
  double const plain = without_sinks.output(b, h, row, 9);
  float const plain_lse = without_sinks.lse(b, h, row);
  bool good = false;
  if (b == 1) {
    good = output == 0.0 && same(lse, sink);
  } else if (std::isnan(sink)) {
    good = std::isnan(output) && std::isnan(lse);
  } else if (sink == kInfinity) {
    good = output == 0.0 && lse == kInfinity;
  } else if (sink == -kInfinity) {
    good = output == plain && lse == plain_lse;
  } else {
    double const sum = std::exp(double(sink)) + std::exp(double(plain_lse));
    double const wanted = plain * std::exp(double(plain_lse)) / sum;
    good = std::fabs(output - wanted) < 2e-2 && std::fabs(double(lse) - std::log(sum)) < 1e-3;
  }
  if (good) return "";
  return "sink " + std::to_string(sink) + " of batch " + std::to_string(b) + ": output " +
         std::to_string(output) + ", lse " + std::to_string(lse);
}

std::string runWithSinks(Problem const& problem, int splits) {
  Tensors tensors(problem), without_sinks(problem);
  FlashAttentionArgs args = tensors.args();
  args.sinks = kSinks;
  args.sinks_stride = 1;
  if (std::string wrong = launch(args, splits); !wrong.empty()) return wrong;
  if (std::string wrong = launch(without_sinks.args(), splits); !wrong.empty()) return wrong;
  for (int i = 0; i < problem.batch * kHeads * problem.seqlen_q; ++i) {
    int const b = i / (kHeads * problem.seqlen_q), h = i / problem.seqlen_q % kHeads;
    std::string wrong = wrongRow(tensors, without_sinks, b, h, i % problem.seqlen_q);
    if (!wrong.empty()) return wrong;
  }
  return tensors.checkGuards();
}

}  // namespace

std::vector<NamedCase> sinkCases() {
  struct {
    char const* name;
    FlashDtype dtype;
    float softcap;
  } const policies[] = {{"fp16 Plain", kFlashFloat16, 0.0f},
                        {"fp16 General", kFlashFloat16, 1000.0f},
                        {"bf16 Plain", kFlashBFloat16, 0.0f},
                        {"fp32", kFlashFloat32, 0.0f}};
  std::vector<NamedCase> all;
  for (auto const& policy : policies) {
    for (int splits : {1, 3}) {
      Problem const problem = problemOf(policy.dtype, policy.softcap);
      all.push_back({std::string("special sinks ") + policy.name + " splits " + std::to_string(splits),
                     [=] { return runWithSinks(problem, splits); }});
    }
  }
  return all;
}

}  // namespace kernel_tests
