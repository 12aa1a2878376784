// SPDX-License-Identifier: Apache-2.0
// A FlashAttention node in ONNX Runtime: its attributes when the session is made, its tensors when it runs.
// The rules and their messages are the TensorRT plugin's (params.h, problem.h).
#pragma once
#include "onnxruntime_abi.h"
#include "problem.h"
#include "rows.h"

namespace flash_export::cpu {

// One operator name with the dtypes of its tensors: what ONNX Runtime calls a custom op.
struct Variant {
  Operator op;
  onnxruntime::ElementType dtype;
  onnxruntime::ElementType bias_dtype;  // where there is a bias
};

onnxruntime::ElementType inputType(Variant const& variant, size_t index);
onnxruntime::ElementType outputType(Variant const& variant, size_t index);

// Reads and checks a node's attributes. Throws PluginError.
Node readNode(Operator op, onnxruntime::Api const& api, onnxruntime::KernelInfo const* info);

// Checks the inputs, computes the node and writes its outputs. Throws PluginError, onnxruntime::Failed,
// std::bad_alloc.
void runNode(Node const& node, Variant const& variant, Kernels const& kernels, onnxruntime::Api const& api,
             onnxruntime::Context* context);

}  // namespace flash_export::cpu
