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

// What the library computes, for each operator; the last two where there is a bias.
struct Dtypes {
  ElementType own, bias;
};
constexpr Dtypes kDtypes[] = {
    {onnxruntime::kFloat, onnxruntime::kFloat},       {onnxruntime::kFloat16, onnxruntime::kFloat16},
    {onnxruntime::kBFloat16, onnxruntime::kBFloat16}, {onnxruntime::kFloat16, onnxruntime::kFloat},
    {onnxruntime::kBFloat16, onnxruntime::kFloat},
};

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

struct VariantOp : CustomOp {
  Variant variant;
};

Variant const& variantOf(CustomOp const* self) { return static_cast<VariantOp const*>(self)->variant; }

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

// ONNX Runtime merges those of one name into one operator that takes each of their combinations of dtypes.
std::vector<VariantOp> makeOperators() {
  std::vector<VariantOp> made;
  for (int32_t op = 0; op < kOperatorCount; ++op) {
    for (Dtypes const& dtypes : kDtypes) {
      if (dtypes.own != dtypes.bias && !hasSideInputs(Operator(op))) continue;
      made.push_back({makeOperator(), {Operator(op), dtypes.own, dtypes.bias}});
    }
  }
  return made;
}

// All variants in one domain, made once: sessions refer to it for as long as they live.
onnxruntime::Domain* theDomain(Api const& api) {
  // Never freed: a session that outlives this library's statics still asks them to destroy its kernels.
  static std::vector<VariantOp> const& operators = *new std::vector<VariantOp>(makeOperators());
  static onnxruntime::Domain* const domain = [&] {
    onnxruntime::Domain* const made = api.createDomain(kNamespace);
    for (VariantOp const& op : operators) api.addOperator(made, &op);
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
