// SPDX-License-Identifier: Apache-2.0
// Makes the plugin of one operator name, from the attributes of an ONNX node or from the fields in a plan.
#pragma once
#include <NvInferRuntime.h>

#include "operators.h"

namespace flash_export {

class AttentionCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit AttentionCreator(Operator op);

  nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name,
                                    nvinfer1::PluginFieldCollection const* fc,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
  nvinfer1::AsciiChar const* getPluginName() const noexcept override;
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

 private:
  Operator const mOp;
  nvinfer1::PluginFieldCollection const mFieldNames;
};

}  // namespace flash_export
