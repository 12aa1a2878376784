// SPDX-License-Identifier: Apache-2.0
// The operator's attributes as one struct. The lists in op.h make its members, read them, check them and
// write them.
#pragma once
#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "operators.h"

namespace flash_export {

struct Params {
#define MEMBER(name, smallest, largest) int32_t name = 0;
  FLASH_ATTENTION_INT_ATTRIBUTES(MEMBER)
#undef MEMBER
#define MEMBER(name, smallest, largest) float name = 0.0f;
  FLASH_ATTENTION_FLOAT_ATTRIBUTES(MEMBER)
#undef MEMBER
};

// Calls visit(name, member, smallest, largest) for every attribute, in the order of op.h.
template <class ParamsRef, class Visit>
void visitAttributes(ParamsRef& params, Visit&& visit) {
#define CALL(name, smallest, largest) visit(#name, params.name, int32_t{smallest}, int32_t{largest});
  FLASH_ATTENTION_INT_ATTRIBUTES(CALL)
#undef CALL
#define CALL(name, smallest, largest) visit(#name, params.name, float{smallest}, float{largest});
  FLASH_ATTENTION_FLOAT_ATTRIBUTES(CALL)
#undef CALL
}

// Reads and checks the fields that TensorRT hands to createPlugin, of a node (build) or of a plan (runtime).
// Throws PluginError for a field that is unknown, missing, twice there, of a wrong type or length, or out of
// range, and for values that contradict each other. `layer` is the node's name, for the message.
Params readParams(Operator op, nvinfer1::PluginFieldCollection const* collection, std::string const& layer);

// One field an attribute: what goes into the plan. The fields point into `params`.
std::vector<nvinfer1::PluginField> fieldsOf(Params const& params);

// The same fields without data: what the creator tells TensorRT's parser to look for on a node.
std::vector<nvinfer1::PluginField> const& fieldNames();

// "layout=0 q_num_heads=8 ...", for engine inspectors.
std::string textOf(Params const& params);

// "FlashAttention 1 layout=0 ... scale=0x1p-3 ...": what a timing cache must tell apart besides shapes and
// types. Floats to the last bit, for two that differ in it run the same kernel with other numbers.
std::string timingCacheIdOf(Operator op, Params const& params);

}  // namespace flash_export
