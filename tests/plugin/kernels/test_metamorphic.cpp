// SPDX-License-Identifier: Apache-2.0
// What must not change the result, or change it in a known way, whatever the numbers are; and numbers chosen
// to hurt. No reference is needed: two runs are compared.
#include <cmath>
#include <vector>

#include "../runner.h"
#include "dispatch.h"
#include "emulation/launch_emulated.h"
#include "problem.h"

using namespace kernel_tests;

namespace {

// One of each softmax policy, each with more than one tile of rows and keys.
std::vector<Problem> onePerPolicy() {
  std::vector<Problem> all(4);
  all[1].softcap = 5.0f;
  all[2].dtype = kFlashFloat32;
  all[3].dtype = kFlashBFloat16;
  for (Problem& p : all) {
    p.heads_q = p.heads_kv = 2;
    p.seqlen_q = 67;
    p.seqlen_kv = 147;
  }
  return all;
}

// A few queries of six heads over five tiles of keys: packed, and split when asked for.
std::vector<Problem> decodePerPolicy() {
  std::vector<Problem> all = onePerPolicy();
  for (Problem& p : all) {
    p.seqlen_q = 2;
    p.seqlen_kv = 291;
    p.heads_q = 6;
    p.causal = p.diagonal = 1;
  }
  return all;
}

void mustRun(FlashAttentionArgs const& args, int splits = 1) {
  std::string const wrong = launch(args, splits);
  EXPECT(wrong.empty(), wrong);
}

// The largest difference of two outputs of the same problem, over all rows; infinite where one is NaN.
double difference(Problem const& p, Tensors const& a, Tensors const& b) {
  double largest = 0.0;
  for (int i = 0; i < p.batch * p.heads_q * p.seqlen_q; ++i) {
    int const batch = i / (p.heads_q * p.seqlen_q), head = i / p.seqlen_q % p.heads_q, row = i % p.seqlen_q;
    for (int d = 0; d < p.v_head_dim; ++d) {
      double const apart = std::fabs(a.output(batch, head, row, d) - b.output(batch, head, row, d));
      largest = apart <= largest ? largest : (std::isnan(apart) ? HUGE_VAL : apart);
    }
  }
  return largest;
}

// Two roundings of results of about 1, and what the weights' rounding adds.
double fewUlp(FlashDtype dtype) {
  return dtype == kFlashFloat32 ? 2e-6 : (dtype == kFlashFloat16 ? 4e-3 : 3e-2);
}

}  // namespace

TEST(permuting_keys_together_with_their_values_changes_nothing_but_rounding) {
  for (Problem const& p : onePerPolicy()) {
    Tensors given(p), reversed(p);
    for (int i = 0; i < p.heads_kv * p.seqlen_kv * p.head_dim; ++i) {
      int const h = i / (p.seqlen_kv * p.head_dim), row = i / p.head_dim % p.seqlen_kv, d = i % p.head_dim;
      reversed.setKey(0, h, p.seqlen_kv - 1 - row, d, given.key(0, h, row, d));
      reversed.setValue(0, h, p.seqlen_kv - 1 - row, d, given.value(0, h, row, d));
    }
    mustRun(given.args());
    mustRun(reversed.args());
    EXPECT(difference(p, given, reversed) <= fewUlp(p.dtype), p.describe()
                                                                  << ": " << difference(p, given, reversed));
  }
}

TEST(a_constant_added_to_every_key_changes_nothing_but_rounding) {
  for (Problem const& p : onePerPolicy()) {
    if (p.softcap > 0.0f) continue;  // a cap sees the constant
    Tensors given(p), moved(p);
    for (int h = 0; h < p.heads_kv; ++h) {
      for (int row = 0; row < p.seqlen_kv; ++row) {
        // Exact in every dtype, so that the scores differ by one number a query and nothing else.
        for (int d = 0; d < p.head_dim; ++d) {
          double const coarse = std::round(given.key(0, h, row, d) * 16) / 16;
          given.setKey(0, h, row, d, coarse);
          moved.setKey(0, h, row, d, coarse + (d == 3 ? 2.0 : 0.0));
        }
      }
    }
    mustRun(given.args());
    mustRun(moved.args());
    EXPECT(difference(p, given, moved) <= 2 * fewUlp(p.dtype), p.describe()
                                                                   << ": " << difference(p, given, moved));
  }
}

TEST(a_group_of_heads_gives_the_bits_of_heads_with_copied_keys) {
  for (Problem grouped : decodePerPolicy()) {
    grouped.heads_kv = 1;
    for (int splits : {1, 3}) {
      Tensors packed(grouped), alone(grouped);
      mustRun(packed.args(), splits);
      FlashAttentionArgs args = alone.args();
      args.kv_num_heads = args.q_num_heads;  // every query head with a key head of its own, all at one place
      args.key.head_stride = args.value.head_stride = 0;
      mustRun(args, splits);
      EXPECT(difference(grouped, packed, alone) == 0.0, grouped.describe() << ", splits " << splits);
    }
  }
}

TEST(a_batch_gives_the_bits_of_its_elements_alone) {
  for (Problem p : decodePerPolicy()) {
    p.batch = 3;
    for (int splits : {1, 3}) {
      Tensors together(p), alone(p);
      mustRun(together.args(), splits);
      for (int b = 0; b < p.batch; ++b) {
        FlashAttentionArgs args = alone.args();
        args.batch = 1;
        args.lse = nullptr;
        int64_t const bytes = p.dtype == kFlashFloat32 ? 4 : 2;
        for (FlashTensor* t : {&args.query, &args.key, &args.value, &args.output}) {
          t->data = static_cast<char*>(t->data) + b * t->batch_stride * bytes;
        }
        mustRun(args, splits);
      }
      EXPECT(difference(p, together, alone) == 0.0, p.describe() << ", splits " << splits);
    }
  }
}

TEST(splitting_the_keys_changes_nothing_but_rounding) {
  for (Problem const& p : decodePerPolicy()) {
    Tensors whole(p);
    mustRun(whole.args());
    for (int splits : {2, 4, 5, 9}) {
      Tensors split(p);
      mustRun(split.args(), splits);
      EXPECT(difference(p, whole, split) <= fewUlp(p.dtype),
             p.describe() << ", splits " << splits << ": " << difference(p, whole, split));
      for (int h = 0; h < p.heads_q; ++h) {
        EXPECT(std::fabs(whole.lse(0, h, 1) - split.lse(0, h, 1)) < 1e-4f, p.describe());
      }
    }
  }
}

TEST(a_window_wider_than_the_sequence_gives_the_bits_of_none) {
  for (Problem const& p : onePerPolicy()) {
    Tensors open(p), wide(p);
    mustRun(open.args());
    FlashAttentionArgs args = wide.args();
    args.window_left = args.window_right = p.seqlen_kv;
    mustRun(args);
    EXPECT(difference(p, open, wide) == 0.0, p.describe());
  }
}

TEST(a_causal_row_is_the_whole_of_its_prefix) {
  for (Problem p : onePerPolicy()) {
    p.causal = 1;
    p.heads_q = p.heads_kv = 1;
    Tensors causal(p), prefix(p);
    mustRun(causal.args());
    for (int row = 0; row < p.seqlen_q; row += 11) {
      FlashAttentionArgs args = prefix.args();
      int64_t const bytes = p.dtype == kFlashFloat32 ? 4 : 2;
      args.query.data = static_cast<char*>(args.query.data) + row * args.query.row_stride * bytes;
      args.output.data = static_cast<char*>(args.output.data) + row * args.output.row_stride * bytes;
      args.causal = 0;
      args.seqlen_q = 1;
      args.seqlen_kv = row + 1;
      args.lse = nullptr;
      mustRun(args);
      for (int d = 0; d < p.v_head_dim; ++d) {
        EXPECT(std::fabs(causal.output(0, 0, row, d) - prefix.output(0, 0, row, d)) <= fewUlp(p.dtype),
               p.describe() << ", row " << row);
      }
    }
  }
}

TEST(one_key_that_takes_all_the_weight_gives_its_value_bit_for_bit) {
  for (Problem const& p : onePerPolicy()) {
    if (p.softcap > 0.0f) continue;  // a cap keeps weights from vanishing
    for (int winner : {0, 63, 64, p.seqlen_kv - 1}) {
      Tensors tensors(p);
      for (int h = 0; h < p.heads_kv; ++h) {
        for (int d = 0; d < p.head_dim; ++d) {
          for (int row = 0; row < p.seqlen_q; ++row) tensors.setQuery(0, h, row, d, d == 5 ? 100.0 : 0.0);
          for (int row = 0; row < p.seqlen_kv; ++row) {
            tensors.setKey(0, h, row, d, d == 5 && row == winner ? 100.0 : 0.0);
          }
        }
      }
      mustRun(tensors.args());
      for (int row = 0; row < p.seqlen_q; ++row) {
        for (int d = 0; d < p.v_head_dim; ++d) {
          EXPECT(tensors.output(0, 1, row, d) == tensors.value(0, 1, winner, d),
                 p.describe() << ", key " << winner << ", row " << row);
        }
      }
    }
  }
}

TEST(equal_scores_give_the_mean_of_the_values) {
  for (Problem const& p : onePerPolicy()) {
    Tensors tensors(p);
    for (int i = 0; i < p.heads_kv * p.seqlen_kv * p.head_dim; ++i) {
      tensors.setKey(0, i / (p.seqlen_kv * p.head_dim), i / p.head_dim % p.seqlen_kv, i % p.head_dim, 1.0);
    }
    mustRun(tensors.args());
    for (int d = 0; d < p.v_head_dim; ++d) {
      double mean = 0.0;
      for (int row = 0; row < p.seqlen_kv; ++row) mean += tensors.value(0, 0, row, d) / p.seqlen_kv;
      EXPECT(std::fabs(tensors.output(0, 0, 66, d) - mean) <= fewUlp(p.dtype), p.describe() << ", " << d);
    }
  }
}

// The running maximum grows with every key, or shrinks with every key, in steps around those that matter to
// fp16: the sums must neither overflow nor lose the late ones.
TEST(scores_that_grow_or_fall_from_key_to_key_are_summed_right) {
  for (Problem p : onePerPolicy()) {
    if (p.softcap > 0.0f) continue;
    p.heads_q = p.heads_kv = 1;
    for (double step : {-1.0, -0.06, 0.06, 1.0}) {
      Tensors tensors(p);
      for (int i = 0; i < p.seqlen_q * p.head_dim; ++i) {
        tensors.setQuery(0, 0, i / p.head_dim, i % p.head_dim, i % p.head_dim == 0 ? 8.0 : 0.0);
      }
      for (int row = 0; row < p.seqlen_kv; ++row) tensors.setKey(0, 0, row, 0, step * row);
      mustRun(tensors.args());
      std::string const wrong = tensors.judge();
      EXPECT(wrong.empty(), p.describe() << ", step " << step << ": " << wrong);
    }
  }
}

// A key of the tile that is visited last passes the maximum so far by just less, in even rows, and by just
// more, in odd rows, than what a row is rescaled from; in some rows it changes nothing.
TEST(a_row_that_is_rescaled_leaves_its_neighbours_bits) {
  for (Problem p : onePerPolicy()) {
    if (p.softcap > 0.0f) continue;
    p.heads_q = p.heads_kv = 1;
    Tensors alone(p), among(p);
    double const threshold = 8.0 * std::log(2.0) / double(p.softmaxScale());
    for (Tensors* t : {&alone, &among}) {
      for (int i = 0; i < p.seqlen_kv * p.head_dim; ++i) {
        t->setKey(0, 0, i / p.head_dim, i % p.head_dim, i == 40 * p.head_dim ? threshold : 0.0);
      }
      for (int row = 0; row < p.seqlen_q; ++row) t->setQuery(0, 0, row, 0, 0.98);
    }
    for (int row = 1; row < p.seqlen_q; row += 2) among.setQuery(0, 0, row, 0, row % 3 == 0 ? 0.0 : 1.02);
    mustRun(alone.args());
    mustRun(among.args());
    EXPECT(among.judge().empty(), p.describe() << ": " << among.judge());
    for (int i = 0; i < p.seqlen_q * p.v_head_dim; ++i) {
      int const row = i / p.v_head_dim, d = i % p.v_head_dim;
      bool const same = among.output(0, 0, row, d) == alone.output(0, 0, row, d);
      EXPECT(same || row % 2 == 1, p.describe() << ", row " << row);
    }
    EXPECT(among.lse(0, 0, 1) != alone.lse(0, 0, 1), "no neighbour changed");
  }
}

TEST(scores_of_ten_thousand_do_not_overflow) {
  for (Problem p : onePerPolicy()) {
    if (p.softcap > 0.0f) continue;
    p.score_std = 1e4f;
    std::string const wrong = run(p);
    EXPECT(wrong.empty(), p.describe() << ": " << wrong);
  }
}

TEST(schedules_give_the_same_bits) {
  for (Problem const& p : decodePerPolicy()) {
    Tensors first(p);
    setenv("FLASH_EMULATION_SEED", "1", 1);
    mustRun(first.args(), 3);
    for (char const* seed : {"2", "77"}) {
      Tensors second(p);
      setenv("FLASH_EMULATION_SEED", seed, 1);
      mustRun(second.args(), 3);
      EXPECT(difference(p, first, second) == 0.0, p.describe() << ", seed " << seed);
    }
    unsetenv("FLASH_EMULATION_SEED");
  }
}
