// SPDX-License-Identifier: Apache-2.0
// The operator's names as a type, with the names of their tensors for messages.
#pragma once
#include <array>
#include <cstdint>

#include "op.h"

namespace flash_export {

#define FLASH_ATTENTION_ALL_OPERATORS(X) FLASH_ATTENTION_OPERATORS(X) FLASH_ATTENTION_CACHE_OPERATORS(X)

enum class Operator : int32_t {
#define ENUMERATOR(name, inputs, outputs) k##name,
  FLASH_ATTENTION_ALL_OPERATORS(ENUMERATOR)
#undef ENUMERATOR
};

struct OperatorInfo {
  char const* name;
  int32_t inputs;
  int32_t outputs;
};

constexpr OperatorInfo kOperators[] = {
#define ROW(name, inputs, outputs) {#name, inputs, outputs},
    FLASH_ATTENTION_ALL_OPERATORS(ROW)
#undef ROW
};
constexpr int32_t kOperatorCount = sizeof(kOperators) / sizeof(kOperators[0]);

constexpr OperatorInfo const& infoOf(Operator op) { return kOperators[static_cast<int32_t>(op)]; }

constexpr bool isPaged(Operator op) { return op == Operator::kFlashAttentionPagedCache; }
constexpr bool isCache(Operator op) { return op == Operator::kFlashAttentionCache || isPaged(op); }
// Whether there are a bias, lengths and sinks among the inputs, and an lse among the outputs.
constexpr bool hasSideInputs(Operator op) { return op == Operator::kFlashAttentionEx || isCache(op); }

// Positions in the operator's lists of inputs and outputs; FlashAttentionPacked has kQuery alone.
enum InputIndex : int32_t {
  kQuery = 0,
  kKey = 1,
  kValue = 2,
  kBias = 3,
  kKvLengths = 4,
  kSinks = 5,
  kKeyCache = 6,
  kValueCache = 7,
  kPageTable = 8
};
enum OutputIndex : int32_t { kOutput = 0, kLse = 1, kKvLengthsOut = 2, kKeyCacheOut = 3, kValueCacheOut = 4 };

// The inputs that hold what the queries attend to.
constexpr int32_t keysOf(Operator op) { return isCache(op) ? kKeyCache : kKey; }
constexpr int32_t valuesOf(Operator op) { return isCache(op) ? kValueCache : kValue; }

constexpr char const* inputName(Operator op, int32_t index) {
  constexpr char const* kNames[] = {"query", "key",       "value",       "bias",      "kv_lengths",
                                    "sinks", "key_cache", "value_cache", "page_table"};
  return op == Operator::kFlashAttentionPacked ? "qkv" : kNames[index];
}

constexpr char const* outputName(int32_t index) {
  constexpr char const* kNames[] = {"output", "lse", "kv_lengths_out", "key_cache_out", "value_cache_out"};
  return kNames[index];
}

}  // namespace flash_export
