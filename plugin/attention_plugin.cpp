// SPDX-License-Identifier: Apache-2.0
#include "attention_plugin.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "cache.h"
#include "describe.h"
#include "log.h"
#include "output_shapes.h"

namespace flash_export {
namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr int32_t kFailed = 1;  // any value but 0; TensorRT ends the build or the inference

// TensorRT asks with as many tensors as the operator has; anything else is a node made by hand.
void checkArity(Node const& node, int32_t inputs, int32_t outputs) {
  OperatorInfo const& info = infoOf(node.op);
  if (inputs == info.inputs && outputs == info.outputs) return;
  throw PluginError(std::string{"cannot use "} + info.name, "node \"" + node.layer + "\"",
                    std::to_string(inputs) + " inputs, " + std::to_string(outputs) + " outputs",
                    std::to_string(info.inputs) + " inputs, " + std::to_string(info.outputs) + " outputs",
                    "give every input of docs/op.md, neutral constants where nothing is meant");
}

// The inputs at one point of the optimisation profile: its smallest, optimal or largest shapes.
std::vector<PluginTensorDesc> inputsAt(DynamicPluginTensorDesc const* inputs, int32_t count,
                                       nvinfer1::Dims DynamicPluginTensorDesc::* point) {
  std::vector<PluginTensorDesc> at;
  for (int32_t i = 0; i < count; ++i) {
    at.push_back(inputs[i].desc);
    at.back().dims = inputs[i].*point;
  }
  return at;
}

// Everything that can be said of a problem before its outputs and addresses are known.
FlashAttentionArgs readSupported(Node const& node, PluginTensorDesc const* inputs) {
  FlashAttentionArgs const args = readProblem(node, inputs);
  checkSupported(node, args);
  if (isCache(node.op)) checkAppendSupported(node, readAppend(node, inputs, args));
  return args;
}

[[noreturn]] void failLaunch(Node const& node, FlashAttentionArgs const& args, int32_t status) {
  std::string const sizes = "batch " + std::to_string(args.batch) + ", heads " +
                            std::to_string(args.q_num_heads) + "/" + std::to_string(args.kv_num_heads) +
                            ", sequence " + std::to_string(args.seqlen_q) + "/" +
                            std::to_string(args.seqlen_kv) + ", head dim " + std::to_string(args.head_dim) +
                            "/" + std::to_string(args.v_head_dim);
  throw PluginError(
      std::string{"cannot launch "} + infoOf(node.op).name, "node \"" + node.layer + "\", " + sizes,
      "CUDA error " + std::to_string(status) + ": " + cudaGetErrorString(static_cast<cudaError_t>(status)),
      "a GPU of compute capability 8.0 or newer and a healthy CUDA context",
      "look for an earlier CUDA error in this process; compute-sanitizer finds its cause");
}

}  // namespace

AttentionPlugin::AttentionPlugin(Node node)
    : BuildCapability(isCache(node.op)),
      mNode(std::move(node)),
      mTimingCacheId(timingCacheIdOf(mNode.op, mNode.params)),
      mMetadata(textOf(mNode.params)),
      mFields(fieldsOf(mNode.params)),
      mFieldCollection{static_cast<int32_t>(mFields.size()), mFields.data()} {}

nvinfer1::IPluginCapability* AttentionPlugin::getCapabilityInterface(
    nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* AttentionPlugin::clone() noexcept {
  return guarded<nvinfer1::IPluginV3*>("clone", nullptr, [&] { return new AttentionPlugin(mNode); });
}

nvinfer1::AsciiChar const* AttentionPlugin::getPluginName() const noexcept { return infoOf(mNode.op).name; }
nvinfer1::AsciiChar const* AttentionPlugin::getPluginVersion() const noexcept { return kVersion; }
nvinfer1::AsciiChar const* AttentionPlugin::getPluginNamespace() const noexcept { return kNamespace; }

int32_t AttentionPlugin::getAliasedInput(int32_t outputIndex) noexcept {
  return aliasedInput(mNode.op, outputIndex);
}

int32_t AttentionPlugin::getNbOutputs() const noexcept { return infoOf(mNode.op).outputs; }

int32_t AttentionPlugin::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs,
                                            DataType const* inputTypes, int32_t nbInputs) const noexcept {
  return guarded("getOutputDataTypes", kFailed, [&] {
    checkArity(mNode, nbInputs, nbOutputs);
    checkInputDtypes(mNode, inputTypes, nbInputs);
    outputTypes[kOutput] = inputTypes[kQuery];
    if (nbOutputs > kLse) outputTypes[kLse] = DataType::kFLOAT;
    if (!isCache(mNode.op)) return 0;
    outputTypes[kKvLengthsOut] = DataType::kINT32;
    for (int32_t output : {kKeyCacheOut, kValueCacheOut}) {
      outputTypes[output] = inputTypes[aliasedInput(mNode.op, output)];
    }
    return 0;
  });
}

int32_t AttentionPlugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs,
                                         nvinfer1::DimsExprs const*, int32_t, nvinfer1::DimsExprs* outputs,
                                         int32_t nbOutputs, nvinfer1::IExprBuilder& exprBuilder) noexcept {
  return guarded("getOutputShapes", kFailed, [&] {
    checkArity(mNode, nbInputs, nbOutputs);
    writeOutputShapes(mNode, inputs, outputs, exprBuilder);
    return 0;
  });
}

bool AttentionPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut,
                                                int32_t nbInputs, int32_t nbOutputs) noexcept {
  return guarded("supportsFormatCombination", false, [&] {
    checkArity(mNode, nbInputs, nbOutputs);
    PluginTensorDesc const& asked = inOut[pos].desc;
    return asked.format == nvinfer1::TensorFormat::kLINEAR &&
           isDtypeSupported(mNode.op, pos, asked.type, inOut[kQuery].desc.type);
  });
}

int32_t AttentionPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                         DynamicPluginTensorDesc const*, int32_t nbOutputs) noexcept {
  return guarded("configurePlugin", kFailed, [&] {
    checkArity(mNode, nbInputs, nbOutputs);
    // The smallest and largest shapes are bounds that need not agree with each other; the optimal ones are
    // shapes.
    readSupported(mNode, inputsAt(in, nbInputs, &DynamicPluginTensorDesc::opt).data());
    return 0;
  });
}

size_t AttentionPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
                                         DynamicPluginTensorDesc const*, int32_t nbOutputs) const noexcept {
  return guarded("getWorkspaceSize", size_t{0}, [&] {
    checkArity(mNode, nbInputs, nbOutputs);
    std::vector<PluginTensorDesc> smallest = inputsAt(inputs, nbInputs, &DynamicPluginTensorDesc::min);
    agreeOnBounds(mNode, smallest.data());
    // Not only to save it: TensorRT for RTX 1.7 builds no plugin with a workspace inside a branch.
    if (readProblem(mNode, smallest.data()).seqlen_q > kFlashMaxSplitQueries) return size_t{0};
    std::vector<PluginTensorDesc> largest = inputsAt(inputs, nbInputs, &DynamicPluginTensorDesc::max);
    agreeOnBounds(mNode, largest.data());
    FlashAttentionArgs const args = readProblem(mNode, largest.data());
    return flashAttentionWorkspace(&args);
  });
}

char const* AttentionPlugin::getTimingCacheID() noexcept { return mTimingCacheId.c_str(); }

char const* AttentionPlugin::getMetadataString() noexcept { return mMetadata.c_str(); }

int32_t AttentionPlugin::onShapeChange(PluginTensorDesc const* in, int32_t nbInputs,
                                       PluginTensorDesc const* out, int32_t nbOutputs) noexcept {
  return guarded("onShapeChange", kFailed, [&] {
    checkArity(mNode, nbInputs, nbOutputs);
    FlashAttentionArgs const args = readSupported(mNode, in);
    checkOutputs(mNode, args, out);
    if (isCache(mNode.op)) checkCacheOutputs(mNode, args, in, out);
    return 0;
  });
}

int32_t AttentionPlugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
                                 void const* const* inputs, void* const* outputs, void* workspace,
                                 cudaStream_t stream) noexcept {
  return guarded("enqueue", kFailed, [&] {
    FlashAttentionArgs args = readProblem(mNode, inputDesc);
    checkOutputs(mNode, args, outputDesc);
    if (isCache(mNode.op) && args.batch > 0) {
      checkCacheOutputs(mNode, args, inputDesc, outputDesc);
      FlashAppendArgs append = readAppend(mNode, inputDesc, args);
      bindAppend(mNode, append, inputs, outputs);
      int32_t const appended = flashAttentionAppend(&append, stream);
      if (appended != 0) {
        checkAppendSupported(mNode, append);
        failLaunch(mNode, args, appended);
      }
    }
    if (isEmpty(args)) return 0;
    bindAddresses(mNode, args, inputs, outputs);
    if (isCache(mNode.op)) useLengthsAfter(args, outputs);
    if (workspace == nullptr && args.seqlen_q <= kFlashMaxSplitQueries &&
        flashAttentionWorkspace(&args) > 0) {
      throw PluginError(std::string{"cannot launch "} + infoOf(mNode.op).name, "node \"" + mNode.layer + "\"",
                        "no workspace",
                        std::to_string(flashAttentionWorkspace(&args)) + " bytes of workspace",
                        "pass the memory that getWorkspaceSize() asked for");
    }
    int32_t const status = flashAttentionLaunch(&args, workspace, stream);
    if (status == 0) return 0;
    checkSupported(mNode, args);  // The launch refused what onShapeChange would have: tell its reasons.
    failLaunch(mNode, args, status);
  });
}

nvinfer1::IPluginV3* AttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  return clone();  // No resources of a context are used.
}

nvinfer1::PluginFieldCollection const* AttentionPlugin::getFieldsToSerialize() noexcept {
  return &mFieldCollection;
}

}  // namespace flash_export
