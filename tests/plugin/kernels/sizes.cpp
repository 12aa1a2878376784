// SPDX-License-Identifier: Apache-2.0
#include "sizes.h"

namespace kernel_tests {

std::vector<Problem> longProblems() {
  std::vector<Problem> all;
  for (int keys : {1000, 2048, 4096}) {
    for (int head_dim : {32, 64, 128, 256}) {
      if (keys == 2048 && head_dim > 32) continue;
      Problem p;
      p.dtype = kFlashFloat32;
      p.heads_q = 1;
      p.seqlen_q = 19;
      p.seqlen_kv = keys;
      p.head_dim = p.v_head_dim = head_dim;
      p.score_std = 1.0f;
      p.value_mean = 2.0f;
      all.push_back(p);
    }
  }
  all.back().head_dim = 16;
  all.back().v_head_dim = 64;
  all.back().heads_q = 4;
  all.back().seqlen_q = 2;
  all.back().splits = 3;
  return all;
}

}  // namespace kernel_tests
