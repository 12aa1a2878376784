// SPDX-License-Identifier: Apache-2.0
// From TensorRT's tensor descriptions to the kernels' arguments: ranks, shapes, dtypes, strides. No maths, no
// CUDA.
#pragma once
#include <NvInferRuntime.h>

#include <string>

#include "kernels/flash_attention.h"
#include "params.h"

namespace flash_export {

// One node: what every message about it needs.
struct Node {
  Operator op;
  Params params;
  std::string layer;  // its name; empty in an engine
};

// Whether the tensor at `position` (inputs first, then outputs) may have this dtype, given those before it.
bool isDtypeSupported(Operator op, int32_t position, nvinfer1::DataType dtype, nvinfer1::DataType query);

// Throws PluginError for the first of the node's inputs whose dtype is wrong.
void checkInputDtypes(Node const& node, nvinfer1::DataType const* dtypes, int32_t count);

// The kernels' arguments for these inputs, without the tensors' addresses: a side input that is there has a
// placeholder that is not null. Of a cache form they attend to the whole cache, new keys not looked at
// (append.h). Throws PluginError for a rank, shape, dtype or format that the operator does not have. `inputs`
// has infoOf(node.op).inputs entries; all dims are known.
FlashAttentionArgs readProblem(Node const& node, nvinfer1::PluginTensorDesc const* inputs);

// Throws PluginError with the kernels' reasons (flashAttentionWhyUnsupported) if they do not run this
// problem.
void checkSupported(Node const& node, FlashAttentionArgs const& args);

// Makes upper bounds of the inputs' shapes agree: a profile may allow 8 batches of key and 4 of query, and
// what runs is within both. Each shared axis gets the smallest of its bounds.
void agreeOnBounds(Node const& node, nvinfer1::PluginTensorDesc* inputs);

// Shape of the operator's first output.
nvinfer1::Dims outputDims(Node const& node, FlashAttentionArgs const& args);

// Throws PluginError if the outputs are not what `args` will write.
void checkOutputs(Node const& node, FlashAttentionArgs const& args,
                  nvinfer1::PluginTensorDesc const* outputs);

// Puts the addresses into `args`, which checkSupported lets pass, so that no head dim is 0. Throws
// PluginError where one is null although its tensor has elements.
void bindAddresses(Node const& node, FlashAttentionArgs& args, void const* const* inputs,
                   void* const* outputs);

// Whether nothing at all is to be written; TensorRT may pass null addresses then.
bool isEmpty(FlashAttentionArgs const& args);

}  // namespace flash_export
