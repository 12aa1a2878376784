// SPDX-License-Identifier: Apache-2.0
// What is checked of every tensor, and the tensors that have heads: query, key, value, qkv and the caches, in
// either layout.
#pragma once
#include <NvInferRuntime.h>

#include <string>

#include "problem.h"

namespace flash_export {

// Throws PluginError: "cannot run <operator>", with the node's and the tensor's name.
[[noreturn]] void refuse(Node const& node, char const* tensor, std::string const& got,
                         std::string const& need);

// Throws PluginError where a dimension is not known or where 64 bits do not hold the strides, which a
// dimension of 0 must not hide.
void requireCountable(Node const& node, char const* tensor, nvinfer1::Dims const& dims);

void requireShape(Node const& node, char const* tensor, nvinfer1::PluginTensorDesc const& desc,
                  nvinfer1::Dims const& need);

void requireLinear(Node const& node, char const* tensor, nvinfer1::PluginTensorDesc const& desc);

// The value as 32 bits; throws PluginError where it does not fit.
int32_t narrow(Node const& node, char const* tensor, char const* axis, int64_t value);

// What the shape of a tensor with heads says; of a paged cache the batch is its pages, the seqlen a page's
// keys.
struct HeadTensor {
  int64_t batch;
  int64_t seqlen;
  int64_t head_dim;
};

// Throws PluginError where the rank or the number of heads is another.
HeadTensor readHeadTensor(Node const& node, int32_t input, nvinfer1::Dims const& dims, int32_t heads);

// The strides of such a tensor, its address null.
FlashTensor stridesOf(int32_t layout, int64_t heads, int64_t seqlen, int64_t head_dim);

}  // namespace flash_export
