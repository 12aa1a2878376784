// SPDX-License-Identifier: Apache-2.0
// The FlashAttention operators as a TensorRT plugin (IPluginV3): what NVIDIA's documentation calls core,
// build and runtime capability in one class. All it does is check, describe and hand over to plugin/kernels.
#pragma once
#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "problem.h"

namespace flash_export {

// The build capability, whose second version can alias outputs to inputs: an operator without such outputs
// shows the first, which every host knows.
class BuildCapability : public nvinfer1::IPluginV3OneBuildV2 {
 public:
  explicit BuildCapability(bool aliases) : mVersion(aliases ? 2 : 1) {}
  nvinfer1::InterfaceInfo getInterfaceInfo() const noexcept override {
    return {"PLUGIN_V3ONE_BUILD", mVersion, 0};
  }

 private:
  int32_t const mVersion;
};

class AttentionPlugin final : public nvinfer1::IPluginV3,
                              public nvinfer1::IPluginV3OneCore,
                              public BuildCapability,
                              public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit AttentionPlugin(Node node);

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  // IPluginV3OneCore
  nvinfer1::AsciiChar const* getPluginName() const noexcept override;
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

  // IPluginV3OneBuild, and its second version
  int32_t getAliasedInput(int32_t outputIndex) noexcept override;
  int32_t getNbOutputs() const noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs,
                             nvinfer1::DataType const* inputTypes, int32_t nbInputs) const noexcept override;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs,
                          nvinfer1::DimsExprs const* shapeInputs, int32_t nbShapeInputs,
                          nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;
  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut,
                                 int32_t nbInputs, int32_t nbOutputs) noexcept override;
  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* outputs,
                          int32_t nbOutputs) const noexcept override;
  char const* getTimingCacheID() noexcept override;
  char const* getMetadataString() noexcept override;

  // IPluginV3OneRuntime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs,
                        nvinfer1::PluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

 private:
  Node const mNode;
  std::string const mTimingCacheId;
  std::string const mMetadata;
  std::vector<nvinfer1::PluginField> const mFields;  // point into mNode.params
  nvinfer1::PluginFieldCollection const mFieldCollection;
};

}  // namespace flash_export
