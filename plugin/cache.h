// SPDX-License-Identifier: Apache-2.0
// The cache forms' own half: new keys and values go into the cache, in place, before the queries attend to
// it.
#pragma once
#include <NvInferRuntime.h>

#include "problem.h"

namespace flash_export {

// The input whose memory an output is, of a cache form; -1 for an output of its own.
constexpr int32_t aliasedInput(Operator op, int32_t output) {
  if (!isCache(op)) return -1;
  return output == kKeyCacheOut ? kKeyCache : output == kValueCacheOut ? kValueCache : -1;
}

// The append's arguments without addresses; `args` is what readProblem made of the same inputs. Throws
// PluginError where the new keys and values do not fit the cache.
FlashAppendArgs readAppend(Node const& node, nvinfer1::PluginTensorDesc const* inputs,
                           FlashAttentionArgs const& args);

// Throws PluginError with the kernels' reasons if they do not run this append.
void checkAppendSupported(Node const& node, FlashAppendArgs const& append);

// Throws PluginError if the outputs from kKvLengthsOut on are not what the append will write.
void checkCacheOutputs(Node const& node, FlashAttentionArgs const& args,
                       nvinfer1::PluginTensorDesc const* inputs, nvinfer1::PluginTensorDesc const* outputs);

// Puts the addresses into `append`. Throws PluginError where one is null although its tensor has elements,
// and where a cache's output is other memory than its input: a host that did not alias them.
void bindAppend(Node const& node, FlashAppendArgs& append, void const* const* inputs, void* const* outputs);

// Makes `args`, its addresses bound, attend with the lengths that the append leaves.
void useLengthsAfter(FlashAttentionArgs& args, void* const* outputs);

}  // namespace flash_export
