// SPDX-License-Identifier: Apache-2.0
// The operator on the CPU, unfused, for tests; docs/op.md line by line.
#pragma once
#include <cstdint>
#include <vector>

namespace reference {

// Row-major tensors: query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv], bias [B, Hq, Sq,
// Skv] or empty, kv_lengths [B] or empty, sinks [Hq] or empty.
struct Problem {
  int64_t batch = 1, heads_q = 2, heads_kv = 1, seqlen_q = 5, seqlen_kv = 7, head_dim = 8, v_head_dim = 8;
  double scale = 0.5, softcap = 0;
  bool causal = false, bottom_right = false;
  int64_t window_left = -1, window_right = -1;
  std::vector<float> query, key, value, bias, sinks;
  std::vector<int32_t> kv_lengths;
};

struct Result {
  std::vector<double> output;  // [B, Hq, Sq, Dv]
  std::vector<double> lse;     // [B, Hq, Sq]
};

// Every operation in `Number`: double is the truth; float, with the scale applied to the key, is the `base`
// of the tolerance rule.
template <class Number>
Result attention(Problem const& problem);

// The tolerance rule for fp32: |out - ref| <= 2 * max|base - ref| + 2 ulp. Returns "" or what is wrong.
char const* judge(std::vector<float> const& output, std::vector<double> const& truth,
                  std::vector<double> const& base);

// The same for the lse, whose bound is max(1e-3, 4 ulp) of its own: it is a logarithm, and a GPU's has an
// error.
char const* judgeLse(std::vector<float> const& lse, std::vector<double> const& truth);

}  // namespace reference
