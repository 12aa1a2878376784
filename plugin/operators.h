// SPDX-License-Identifier: Apache-2.0
// The operator's names as a type, with the names of their tensors for messages.
#pragma once
#include <array>
#include <cstdint>

#include "op.h"

namespace flash_export {

enum class Operator : int32_t {
#define ENUMERATOR(name, inputs, outputs) k##name,
  FLASH_ATTENTION_OPERATORS(ENUMERATOR)
#undef ENUMERATOR
};

struct OperatorInfo {
  char const* name;
  int32_t inputs;
  int32_t outputs;
};

constexpr OperatorInfo kOperators[] = {
#define ROW(name, inputs, outputs) {#name, inputs, outputs},
    FLASH_ATTENTION_OPERATORS(ROW)
#undef ROW
};
constexpr int32_t kOperatorCount = sizeof(kOperators) / sizeof(kOperators[0]);

constexpr OperatorInfo const& infoOf(Operator op) { return kOperators[static_cast<int32_t>(op)]; }

// Positions in the operator's lists of inputs and outputs; FlashAttentionPacked has kQuery alone.
enum InputIndex : int32_t { kQuery = 0, kKey = 1, kValue = 2, kBias = 3, kKvLengths = 4, kSinks = 5 };
enum OutputIndex : int32_t { kOutput = 0, kLse = 1 };

constexpr char const* inputName(Operator op, int32_t index) {
  constexpr char const* kNames[] = {"query", "key", "value", "bias", "kv_lengths", "sinks"};
  return op == Operator::kFlashAttentionPacked ? "qkv" : kNames[index];
}

constexpr char const* outputName(int32_t index) { return index == kOutput ? "output" : "lse"; }

}  // namespace flash_export
