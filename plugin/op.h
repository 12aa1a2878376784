// SPDX-License-Identifier: Apache-2.0
// The operator's contract in C++: names, inputs, outputs, attributes, limits. Nothing else.
// docs/op.md is its definition in words, exporter/flash_export/op.py its twin; tests/contract/ compares them.
#pragma once
#include <cstdint>

namespace flash_export {

constexpr char const* kNamespace = "flash_export";  // ONNX domain and plugin namespace
constexpr char const* kVersion = "1";               // plugin version; ONNX since_version 1

// One row an operator name: X(name, inputs, outputs). Arity is fixed, an input is never omitted.
// FlashAttention:       query, key, value -> output
// FlashAttentionEx:     query, key, value, bias, kv_lengths, sinks -> output, lse
// FlashAttentionPacked: qkv -> output
#define FLASH_ATTENTION_OPERATORS(X) \
  X(FlashAttention, 3, 1)            \
  X(FlashAttentionEx, 6, 2)          \
  X(FlashAttentionPacked, 1, 1)

// The cache forms: new keys and values go into a cache in place, and the queries attend to all of it.
// FlashAttentionCache:      query, key, value, bias, kv_lengths, sinks, key_cache, value_cache
//                           -> output, lse, kv_lengths_out, key_cache_out, value_cache_out
// FlashAttentionPagedCache: the same and page_table -> the same
#define FLASH_ATTENTION_CACHE_OPERATORS(X) \
  X(FlashAttentionCache, 8, 5)             \
  X(FlashAttentionPagedCache, 9, 5)

// clang-format off
// One row an INT attribute: X(name, smallest, largest). Every operator carries all of them, always written.
#define FLASH_ATTENTION_INT_ATTRIBUTES(X)                                                                    \
  X(layout, 0, 1)                  /* 0: [B, S, H*D]; 1: [B, H, S, D]; of query, key, value, output */      \
  X(q_num_heads, 1, 65535)         /* a multiple of kv_num_heads */                                         \
  X(kv_num_heads, 1, 65535)        /* GQA and MQA without expanding key and value */                        \
  X(causal, 0, 1)                                                                                           \
  X(diagonal, 0, 1)                /* 0: top-left; 1: bottom-right; used by causal and windows */           \
  X(window_left, -1, 2147483647)   /* keys visible before the diagonal; -1 off */                           \
  X(window_right, -1, 2147483647)  /* keys visible after the diagonal; -1 off */                            \
  X(has_bias, 0, 1)                /* with side inputs only: 0 when bias is the neutral constant, never read */ \
  X(has_kv_lengths, 0, 1)          /* with side inputs only; 1 on the cache forms */                        \
  X(has_sinks, 0, 1)               /* with side inputs only */

// One row a FLOAT attribute: X(name, smallest, largest); always finite.
#define FLASH_ATTENTION_FLOAT_ATTRIBUTES(X)                                \
  X(scale, -1e30f, 1e30f)   /* a multiplier of Q.K^T */                    \
  X(softcap, 0.0f, 1e30f)   /* 0 off; cap * tanh(score / cap), before bias and mask */
// clang-format on

}  // namespace flash_export
