// SPDX-License-Identifier: Apache-2.0
// Rows whose scores are so large that Plain kernels take the maximum off first (softmax.h), beside rows that
// are not.
#include "../runner.h"
#include "emulation/launch_emulated.h"
#include "problem.h"

using namespace kernel_tests;

namespace {

Problem withDtype(FlashDtype dtype) {
  Problem p;
  p.dtype = dtype;
  p.heads_q = p.heads_kv = 1;
  p.seqlen_q = 37;
  p.seqlen_kv = 197;
  p.scale = 1.0f;  // so that queries times 2^15 are within fp16
  return p;
}

// A query times 2^15: the largest of its scores are past 2^17, of fp16 and bf16 alike.
void makeSteep(Tensors& tensors, Problem const& p, int row) {
  for (int d = 0; d < p.head_dim; ++d) tensors.setQuery(0, 0, row, d, tensors.query(0, 0, row, d) * 32768.0);
}

}  // namespace

TEST(a_steep_row_leaves_the_bits_of_its_neighbours) {
  for (FlashDtype dtype : {kFlashFloat16, kFlashBFloat16}) {
    for (int splits : {1, 3}) {
      Problem const problem = withDtype(dtype);
      Tensors sound(problem), tensors(problem);
      makeSteep(tensors, problem, 11);
      EXPECT(launch(sound.args(), splits).empty(), flashEmulationError());
      EXPECT(launch(tensors.args(), splits).empty(), flashEmulationError());
      for (int row = 0; row < problem.seqlen_q; ++row) {
        bool same = sound.lse(0, 0, row) == tensors.lse(0, 0, row);
        for (int d = 0; d < problem.v_head_dim; ++d) {
          same = same && sound.output(0, 0, row, d) == tensors.output(0, 0, row, d);
        }
        EXPECT(same == (row != 11), problem.describe() << ", row " << row << ", splits " << splits);
      }
      std::string const wrong = tensors.judge();
      EXPECT(wrong.empty(), problem.describe() << ": " << wrong);
    }
  }
}

// The scores of a tile without a visible key are all -inf: nothing is taken off them.
TEST(a_steep_row_takes_nothing_of_tiles_that_it_does_not_see) {
  for (FlashDtype dtype : {kFlashFloat16, kFlashBFloat16}) {
    Problem problem = withDtype(dtype);
    problem.causal = problem.diagonal = 1;
    problem.seqlen_q = 197;  // rows of one warp see the last tile, others of it do not
    problem.seqlen_kv = 207;
    problem.window_left = 40;
    Tensors tensors(problem);
    for (int row = 0; row < problem.seqlen_q; row += 3) makeSteep(tensors, problem, row);
    EXPECT(launch(tensors.args(), 1).empty(), flashEmulationError());
    std::string const wrong = tensors.judge();
    EXPECT(wrong.empty(), problem.describe() << ": " << wrong);
  }
}
