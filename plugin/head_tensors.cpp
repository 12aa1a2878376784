// SPDX-License-Identifier: Apache-2.0
#include "head_tensors.h"

#include <algorithm>
#include <limits>

#include "describe.h"
#include "log.h"

namespace flash_export {

using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

void refuse(Node const& node, char const* tensor, std::string const& got, std::string const& need) {
  throw PluginError(std::string{"cannot run "} + infoOf(node.op).name,
                    "node \"" + node.layer + "\", tensor " + tensor, got, need,
                    "correct the model or the shapes given to it; docs/op.md has the rules");
}

void requireCountable(Node const& node, char const* tensor, Dims const& dims) {
  if (dims.nbDims < 0 || dims.nbDims > Dims::MAX_DIMS) refuse(node, tensor, "no shape", "a known rank");
  int64_t count = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) {
    if (dims.d[i] < 0 || __builtin_mul_overflow(count, std::max<int64_t>(dims.d[i], 1), &count)) {
      refuse(node, tensor, "shape " + textOf(dims), "known dimensions whose product fits 63 bits");
    }
  }
}

void requireShape(Node const& node, char const* tensor, PluginTensorDesc const& desc, Dims const& need) {
  bool same = desc.dims.nbDims == need.nbDims;
  for (int32_t i = 0; same && i < need.nbDims; ++i) same = desc.dims.d[i] == need.d[i];
  if (!same) refuse(node, tensor, "shape " + textOf(desc.dims), "shape " + textOf(need));
}

void requireLinear(Node const& node, char const* tensor, PluginTensorDesc const& desc) {
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) {
    refuse(node, tensor, "tensor format " + std::to_string(static_cast<int32_t>(desc.format)),
           "the linear format");
  }
}

HeadTensor readHeadTensor(Node const& node, int32_t input, Dims const& dims, int32_t heads) {
  char const* const name = inputName(node.op, input);
  std::string const headsText = std::to_string(heads);
  if (node.params.layout == 1) {
    if (dims.nbDims != 4 || dims.d[1] != heads) {
      refuse(node, name, "shape " + textOf(dims), "[B, " + headsText + ", S, D] (layout 1)");
    }
    return {dims.d[0], dims.d[2], dims.d[3]};
  }
  if (dims.nbDims != 3 || dims.d[2] % heads != 0) {
    refuse(node, name, "shape " + textOf(dims), "[B, S, " + headsText + "*D] (layout 0)");
  }
  return {dims.d[0], dims.d[1], dims.d[2] / heads};
}

FlashTensor stridesOf(int32_t layout, int64_t heads, int64_t seqlen, int64_t head_dim) {
  if (layout == 1) return {nullptr, heads * seqlen * head_dim, seqlen * head_dim, head_dim};
  return {nullptr, seqlen * heads * head_dim, head_dim, heads * head_dim};
}

int32_t narrow(Node const& node, char const* tensor, char const* axis, int64_t value) {
  if (value > std::numeric_limits<int32_t>::max()) {
    refuse(node, tensor, std::string{axis} + " " + std::to_string(value), "at most 2147483647");
  }
  return static_cast<int32_t>(value);
}

}  // namespace flash_export
