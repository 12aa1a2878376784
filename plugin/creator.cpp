// SPDX-License-Identifier: Apache-2.0
#include "creator.h"

#include "attention_plugin.h"
#include "log.h"

namespace flash_export {

AttentionCreator::AttentionCreator(Operator op)
    : mOp(op), mFieldNames{static_cast<int32_t>(fieldNames().size()), fieldNames().data()} {}

nvinfer1::IPluginV3* AttentionCreator::createPlugin(nvinfer1::AsciiChar const* name,
                                                    nvinfer1::PluginFieldCollection const* fc,
                                                    nvinfer1::TensorRTPhase) noexcept {
  return guarded<nvinfer1::IPluginV3*>("createPlugin", nullptr, [&] {
    std::string const layer = name == nullptr ? "" : name;
    return new AttentionPlugin(Node{mOp, readParams(mOp, fc, layer), layer});
  });
}

nvinfer1::PluginFieldCollection const* AttentionCreator::getFieldNames() noexcept { return &mFieldNames; }
nvinfer1::AsciiChar const* AttentionCreator::getPluginName() const noexcept { return infoOf(mOp).name; }
nvinfer1::AsciiChar const* AttentionCreator::getPluginVersion() const noexcept { return kVersion; }
nvinfer1::AsciiChar const* AttentionCreator::getPluginNamespace() const noexcept { return kNamespace; }

}  // namespace flash_export
