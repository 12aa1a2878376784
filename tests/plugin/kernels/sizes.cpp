// SPDX-License-Identifier: Apache-2.0
#include "sizes.h"

namespace kernel_tests {

using flash_export::kernels::Variant;

// Queries and keys of `size` each, as a product of the dtype's largest usual numbers.
std::vector<Problem> hugeProblems(Variant const& v) {
  if (v.dtype == kFlashFloat32) return {};
  bool const half = v.dtype == kFlashFloat16;
  Problem basic;
  basic.dtype = FlashDtype(v.dtype);
  basic.head_dim = basic.v_head_dim = v.head_dim;
  basic.seqlen_q = 35;
  basic.seqlen_kv = 3 * v.tile_kv + 5;
  basic.heads_q = 1;
  if (v.general()) basic.layout = Layout::kGaps;
  auto const sized = [&](float size) {
    Problem p = basic;
    p.scale = 1.0f / 8.0f;
    p.key_std = size;
    p.score_std = size * size;
    return p;
  };
  auto const growing = [&](float growth) {
    Problem p = basic;
    p.scale = 1.0f;
    p.key_std = 12000.0f;
    p.score_std = 1e-9f;  // what is below a rounding of such scores in fp32 has no part in them
    p.growth = growth;
    return p;
  };
  float const growth = half ? 7e7f : 7e8f;
  std::vector<Problem> all = {sized(half ? 12000.0f : 3e4f),
                              sized(half ? 8000.0f : 7e4f),
                              sized(half ? 12000.0f : 1e5f),
                              growing(growth),
                              growing(growth),
                              growing(-growth)};
  all[1].causal = 1;
  all[1].wants_lse = false;  // of a few keys, near 0: Q.K cancels out in fp32
  all[2].heads_q = 4;        // packed heads, split keys
  all[2].seqlen_q = 3;
  all[2].splits = 3;
  all[2].sinks = 1;
  all[4].causal = all[4].diagonal = 1;
  all[4].seqlen_q = 5;
  all[4].splits = 2;
  return all;
}

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
