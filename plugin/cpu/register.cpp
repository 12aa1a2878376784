// SPDX-License-Identifier: Apache-2.0
// The one symbol that the library exports: SessionOptions.register_custom_ops_library calls it.
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "log.h"
#include "node.h"
#include "target.h"

namespace flash_export::cpu {
namespace {

using onnxruntime::Api;
using onnxruntime::Context;
using onnxruntime::CustomOp;
using onnxruntime::ElementType;
using onnxruntime::Failed;
using onnxruntime::KernelInfo;
using onnxruntime::Status;
using onnxruntime::Table;

// ONNX Runtime merges those of one name into one operator that takes each of their combinations of dtypes.
constexpr Variant kVariants[] = {
    {Operator::kFlashAttention, onnxruntime::kFloat, onnxruntime::kFloat},
    {Operator::kFlashAttention, onnxruntime::kFloat16, onnxruntime::kFloat16},
    {Operator::kFlashAttention, onnxruntime::kBFloat16, onnxruntime::kBFloat16},
    {Operator::kFlashAttentionEx, onnxruntime::kFloat, onnxruntime::kFloat},
    {Operator::kFlashAttentionEx, onnxruntime::kFloat16, onnxruntime::kFloat16},
    {Operator::kFlashAttentionEx, onnxruntime::kFloat16, onnxruntime::kFloat},
    {Operator::kFlashAttentionEx, onnxruntime::kBFloat16, onnxruntime::kBFloat16},
    {Operator::kFlashAttentionEx, onnxruntime::kBFloat16, onnxruntime::kFloat},
    {Operator::kFlashAttentionPacked, onnxruntime::kFloat, onnxruntime::kFloat},
    {Operator::kFlashAttentionPacked, onnxruntime::kFloat16, onnxruntime::kFloat16},
    {Operator::kFlashAttentionPacked, onnxruntime::kBFloat16, onnxruntime::kBFloat16},
};
constexpr size_t kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

// What ONNX Runtime keeps for a node of a session. Immutable: sessions run their nodes on many threads.
struct Kernel {
  Api api;
  Variant const& variant;
  Node node;
  Kernels const& kernels;
};

// Runs `body` for the runtime: an exception becomes its status.
template <class Body>
Status* guarded(Api const& api, Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (Failed const& failed) {
    return failed.status;
  } catch (PluginError const& error) {
    return api.createStatus(onnxruntime::kInvalidArgument, error.what());
  } catch (std::exception const& error) {
    return api.createStatus(onnxruntime::kFail, error.what());
  } catch (...) {
    return api.createStatus(onnxruntime::kFail, "FlashAttention: an unknown exception");
  }
}

CustomOp gOperators[kVariantCount];

Variant const& variantOf(CustomOp const* self) { return kVariants[self - gOperators]; }

CustomOp makeOperator() {
  CustomOp op{};
  op.version = onnxruntime::kApiVersion;
  op.getName = [](CustomOp const* self) { return infoOf(variantOf(self).op).name; };
  op.getExecutionProvider = [](CustomOp const*) -> char const* { return nullptr; };
  op.getInputType = [](CustomOp const* self, size_t i) -> int { return inputType(variantOf(self), i); };
  op.getInputTypeCount = [](CustomOp const* self) { return size_t(infoOf(variantOf(self).op).inputs); };
  op.getOutputType = [](CustomOp const* self, size_t i) -> int { return outputType(variantOf(self), i); };
  op.getOutputTypeCount = [](CustomOp const* self) { return size_t(infoOf(variantOf(self).op).outputs); };
  op.getInputCharacteristic = [](CustomOp const*, size_t) { return 0; };
  op.getOutputCharacteristic = [](CustomOp const*, size_t) { return 0; };
  op.getInputMemoryType = [](CustomOp const*, size_t) { return 0; };
  op.getStartVersion = [](CustomOp const*) { return 1; };
  op.getEndVersion = [](CustomOp const*) { return 1; };
  op.createKernelV2 = [](CustomOp const* self, Table* table, KernelInfo const* info, void** kernel) {
    Api const api(table);
    return guarded(api, [&] {
      Variant const& variant = variantOf(self);
      *kernel = new Kernel{api, variant, readNode(variant.op, api, info), chosenKernels()};
    });
  };
  op.kernelComputeV2 = [](void* kernel, Context* context) {
    Kernel const& k = *static_cast<Kernel const*>(kernel);
    return guarded(k.api, [&] { runNode(k.node, k.variant, k.kernels, k.api, context); });
  };
  op.kernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

std::string tooOld(char const* version) {
  return PluginError("cannot load FlashAttention's operator for the CPU", "ONNX Runtime",
                     std::string{"version "} + version, "version 1.17 or newer",
                     "install a newer onnxruntime, or leave the library out: the model's own functions run "
                     "without it")
      .what();
}

// All variants in one domain, made once: sessions refer to it for as long as they live.
onnxruntime::Domain* theDomain(Api const& api) {
  static onnxruntime::Domain* const domain = [&] {
    onnxruntime::Domain* const made = api.createDomain(kNamespace);
    for (CustomOp& op : gOperators) {
      op = makeOperator();
      api.addOperator(made, &op);
    }
    return made;
  }();
  return domain;
}

}  // namespace
}  // namespace flash_export::cpu

extern "C" __attribute__((visibility("default"))) flash_export::onnxruntime::Status* RegisterCustomOps(
    flash_export::onnxruntime::Options* options, flash_export::onnxruntime::ApiBase const* base) {
  using namespace flash_export;
  if (onnxruntime::Table* const table = base->getApi(onnxruntime::kApiVersion)) {
    onnxruntime::Api const api(table);
    return cpu::guarded(api, [&] { api.addDomain(options, cpu::theDomain(api)); });
  }
  std::string const text = cpu::tooOld(base->getVersionString());
  return onnxruntime::Api(base->getApi(1)).createStatus(onnxruntime::kFail, text.c_str());
}
