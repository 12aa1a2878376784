// SPDX-License-Identifier: Apache-2.0
// The operator's library on a CPU in eight threads at once, from its registration to its results, in a host
// that is compiled with the same sanitizer; ONNX Runtime's own builds hide what happens in their threads.
#include <random>

#include "fake_runtime.h"
#include "op.h"
#include "reference.h"
#include "threads.h"

namespace {

constexpr int kThreads = 8;
constexpr int kRounds = 3;

fake::NodeInfo nodeOf(reference::Problem const& p) {
  fake::NodeInfo node{"attention", {}, {}, {{"plugin_version", flash_export::kVersion}}};
#define SMALLEST(name, smallest, largest) node.ints[#name] = smallest;
  FLASH_ATTENTION_INT_ATTRIBUTES(SMALLEST)
#undef SMALLEST
  node.ints["layout"] = 1;
  node.ints["q_num_heads"] = p.heads_q;
  node.ints["kv_num_heads"] = p.heads_kv;
  node.ints["causal"] = p.causal;
  node.floats = {{"scale", float(p.scale)}, {"softcap", float(p.softcap)}};
  return node;
}

// A problem of its own for each thread: tiles where there are many queries, slices where there are few.
reference::Problem problemOf(int thread) {
  reference::Problem p;
  p.heads_q = 4, p.heads_kv = 2;
  p.seqlen_q = thread % 2 == 0 ? 67 + thread : 1;
  p.seqlen_kv = 141 + 10 * thread;
  p.head_dim = 32, p.v_head_dim = 37;
  p.causal = thread % 4 == 0;
  std::mt19937 random(unsigned(thread) + 3);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  auto const fill = [&](std::vector<float>& to, int64_t count) {
    to.resize(size_t(count));
    for (float& x : to) x = normal(random);
  };
  fill(p.query, p.heads_q * p.seqlen_q * p.head_dim);
  fill(p.key, p.heads_kv * p.seqlen_kv * p.head_dim);
  fill(p.value, p.heads_kv * p.seqlen_kv * p.v_head_dim);
  return p;
}

fake::Run runOf(reference::Problem const& p) {
  return {{{{1, p.heads_q, p.seqlen_q, p.head_dim}, p.query},
           {{1, p.heads_kv, p.seqlen_kv, p.head_dim}, p.key},
           {{1, p.heads_kv, p.seqlen_kv, p.v_head_dim}, p.value}},
          std::vector<fake::Tensor>(1)};
}

void expectRight(reference::Problem const& p, fake::Run const& run) {
  std::string const wrong = reference::judge(run.outputs[0].values, reference::attention<double>(p).output,
                                             reference::attention<float>(p).output);
  EXPECT(wrong.empty(), wrong);
}

TEST(eight_sessions_that_open_at_once_compute_what_they_should) {
  runner::inThreads(kThreads, [](int thread) {
    reference::Problem const problem = problemOf(thread);
    for (int round = 0; round < kRounds; ++round) {
      fake::Session const session("FlashAttention", nodeOf(problem));
      fake::Run run = runOf(problem);
      session.run(run);
      expectRight(problem, run);
    }
  });
}

TEST(one_session_runs_eight_times_at_once) {
  for (int seed : {0, 1}) {
    reference::Problem const problem = problemOf(seed);
    fake::Session const session("FlashAttention", nodeOf(problem));
    runner::inThreads(kThreads, [&](int) {
      for (int round = 0; round < kRounds; ++round) {
        fake::Run run = runOf(problem);
        session.run(run);
        expectRight(problem, run);
      }
    });
  }
}

template <class Call>
void expectRefused(Call const& call, std::string const& words) {
  std::string text = "nothing was refused";
  try {
    call();
  } catch (std::runtime_error const& error) {
    text = error.what();
  }
  EXPECT(text.find(words) != std::string::npos, text);
}

TEST(eight_sessions_that_are_refused_each_get_their_message) {
  runner::inThreads(kThreads, [](int thread) {
    reference::Problem problem = problemOf(thread);
    fake::Session const session("FlashAttention", nodeOf(problem));
    fake::Run run = runOf(problem);
    run.inputs[1].shape[3] -= 1 + thread;
    expectRefused([&] { session.run(run); }, "head dim " + std::to_string(31 - thread));
    problem.heads_kv = 3;
    expectRefused([&] { fake::Session("FlashAttention", nodeOf(problem)); }, "3 key and value heads");
  });
}

}  // namespace
