// SPDX-License-Identifier: Apache-2.0
// NaN and infinities in the tensors: they show where the formula has them, and nowhere else.
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "../runner.h"
#include "emulation/launch_emulated.h"
#include "problem.h"

using namespace kernel_tests;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One of each softmax policy.
std::vector<Problem> onePerPolicy() {
  std::vector<Problem> all(3);
  all[1].softcap = 5.0f;
  all[2].dtype = kFlashFloat32;
  for (Problem& p : all) {
    p.heads_q = p.heads_kv = 1;
    p.seqlen_q = 37;
    p.seqlen_kv = 83;
  }
  return all;
}

void launch(Tensors& tensors) {
  FlashAttentionArgs const args = tensors.args();
  EXPECT(flashAttentionLaunch(&args, nullptr, nullptr) == 0, flashEmulationError());
}

}  // namespace

TEST(nan_in_a_query_row_shows_in_that_row_alone) {
  for (Problem const& problem : onePerPolicy()) {
    Tensors tensors(problem);
    tensors.setQuery(0, 0, 11, 5, std::nan(""));
    launch(tensors);
    for (int row = 0; row < problem.seqlen_q; ++row) {
      bool const all_nan = std::isnan(tensors.output(0, 0, row, 0)) &&
                           std::isnan(tensors.output(0, 0, row, 63)) && std::isnan(tensors.lse(0, 0, row));
      bool const any_nan = std::isnan(tensors.output(0, 0, row, 0)) || std::isnan(tensors.lse(0, 0, row));
      EXPECT(row == 11 ? all_nan : !any_nan, problem.describe() << ", row " << row);
    }
  }
}

TEST(nan_in_a_key_shows_in_the_rows_that_see_it_alone) {
  for (Problem problem : onePerPolicy()) {
    for (Bias bias : {Bias::kNone, Bias::kHoles}) {
      problem.bias = bias;
      problem.causal = bias == Bias::kNone;
      Tensors sound(problem), tensors(problem);
      tensors.setKey(0, 0, 20, 5, std::nan(""));
      launch(sound);
      launch(tensors);
      int seen = 0;
      for (int row = 0; row < problem.seqlen_q; ++row) {
        bool const sees = tensors.sees(0, 0, row, 20);
        seen += sees;
        double const output = tensors.output(0, 0, row, 7);
        EXPECT(sees ? std::isnan(output) : output == sound.output(0, 0, row, 7), problem.describe()
                                                                                     << ", row " << row);
      }
      EXPECT(seen > 0 && seen < problem.seqlen_q, seen);
    }
  }
}

TEST(a_scale_of_0_gives_the_mean_of_the_values) {
  Problem problem;
  Tensors tensors(problem);
  FlashAttentionArgs args = tensors.args();
  args.scale = 0.0f;
  EXPECT(flashAttentionLaunch(&args, nullptr, nullptr) == 0, flashEmulationError());
  double mean = 0.0;
  for (int key = 0; key < problem.seqlen_kv; ++key) mean += tensors.value(0, 0, key, 9) / problem.seqlen_kv;
  EXPECT(std::fabs(tensors.output(0, 1, 66, 9) - mean) < 2e-3, tensors.output(0, 1, 66, 9)
                                                                   << ", not " << mean);
}

// Where a product of scale and maximum is off by more than an exponential's range.
TEST(a_scale_of_any_size_leaves_the_largest_score_its_weight) {
  for (FlashDtype dtype : {kFlashFloat16, kFlashBFloat16, kFlashFloat32}) {
    for (float scale : {1e3f, 1e6f, 1e12f, 1e30f}) {
      Problem problem;
      problem.dtype = dtype;
      problem.scale = scale;
      problem.score_std = scale * 8;  // queries of about 1
      problem.wants_lse = false;
      std::string const wrong = run(problem);
      EXPECT(wrong.empty(), problem.describe() << ": " << wrong);
    }
  }
}

TEST(an_infinite_score_is_nan_as_in_the_formula) {
  for (Problem const& problem : onePerPolicy()) {
    if (problem.softcap > 0.0f) continue;  // the cap makes it finite
    Tensors tensors(problem);
    tensors.setQuery(0, 0, 3, 0, kInfinity);
    launch(tensors);
    EXPECT(std::isnan(tensors.output(0, 0, 3, 0)), problem.describe());
    EXPECT(std::isfinite(tensors.output(0, 0, 4, 0)), problem.describe());
  }
}

TEST(an_infinite_value_shows_in_its_column_alone) {
  for (Problem const& problem : onePerPolicy()) {
    Tensors tensors(problem);
    tensors.setValue(0, 0, 40, 9, kInfinity);
    launch(tensors);
    EXPECT(!std::isfinite(tensors.output(0, 0, 0, 9)), problem.describe());
    EXPECT(std::isfinite(tensors.output(0, 0, 0, 8)), problem.describe());
  }
}

TEST(the_same_problem_gives_the_same_bits_on_every_schedule) {
  for (Problem const& problem : onePerPolicy()) {
    Tensors first(problem), second(problem);
    launch(first);
    launch(second);
    for (int row = 0; row < problem.seqlen_q; ++row) {
      for (int d = 0; d < problem.v_head_dim; ++d) {
        EXPECT(first.output(0, 0, row, d) == second.output(0, 0, row, d), problem.describe());
      }
    }
  }
}

TEST(host_threads_launch_side_by_side) {
  std::vector<std::string> wrong(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < wrong.size(); ++i) {
    threads.emplace_back([i, &wrong] {
      Problem problem = onePerPolicy()[i % 3];
      problem.seqlen_q += int(i);
      for (int round = 0; round < 3; ++round) wrong[i] += run(problem);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::string const& text : wrong) EXPECT(text.empty(), text);
}
