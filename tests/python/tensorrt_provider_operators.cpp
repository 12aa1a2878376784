// SPDX-License-Identifier: Apache-2.0
// The operators that ONNX Runtime's TensorRT provider makes of the plugins in TensorRT's registry, as far as
// a graph is checked against them: domain trt.plugins, any number of inputs and outputs of any type, no shape
// inference. Kernels are of the CPU's provider and compute nothing: a session is only made, never run.
#include "cpu/onnxruntime_abi.h"

using namespace flash_export::onnxruntime;

namespace {

constexpr char const* kNames[] = {"FlashAttention", "FlashAttentionEx", "FlashAttentionPacked"};
constexpr size_t kCount = sizeof(kNames) / sizeof(kNames[0]);
constexpr int kVariadic = 2, kUndefined = 0;
CustomOp gOperators[kCount];

void makeOperator(CustomOp& op) {
  op.version = kApiVersion;
  op.getName = [](CustomOp const* self) { return kNames[self - gOperators]; };
  op.getExecutionProvider = [](CustomOp const*) -> char const* { return nullptr; };
  op.getInputType = [](CustomOp const*, size_t) { return kUndefined; };
  op.getInputTypeCount = [](CustomOp const*) { return size_t{1}; };
  op.getOutputType = [](CustomOp const*, size_t) { return kUndefined; };
  op.getOutputTypeCount = [](CustomOp const*) { return size_t{1}; };
  op.getInputCharacteristic = [](CustomOp const*, size_t) { return kVariadic; };
  op.getOutputCharacteristic = [](CustomOp const*, size_t) { return kVariadic; };
  op.getInputMemoryType = [](CustomOp const*, size_t) { return 0; };
  op.getVariadicInputMinArity = [](CustomOp const*) { return 1; };
  op.getVariadicInputHomogeneity = [](CustomOp const*) { return 0; };
  op.getVariadicOutputMinArity = [](CustomOp const*) { return 1; };
  op.getVariadicOutputHomogeneity = [](CustomOp const*) { return 0; };
  op.getStartVersion = [](CustomOp const*) { return 1; };
  op.getEndVersion = [](CustomOp const*) { return 1; };
  op.createKernelV2 = [](CustomOp const* self, Table*, KernelInfo const*, void** kernel) -> Status* {
    *kernel = const_cast<CustomOp*>(self);
    return nullptr;
  };
  op.kernelComputeV2 = [](void*, Context*) -> Status* { return nullptr; };
  op.kernelDestroy = [](void*) {};
}

}  // namespace

extern "C" Status* RegisterCustomOps(Options* options, ApiBase const* base) {
  Api const api(base->getApi(kApiVersion));
  static Domain* const domain = [&] {
    Domain* const made = api.createDomain("trt.plugins");
    for (CustomOp& op : gOperators) {
      makeOperator(op);
      api.addOperator(made, &op);
    }
    return made;
  }();
  api.addDomain(options, domain);
  return nullptr;
}
