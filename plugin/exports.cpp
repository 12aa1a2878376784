// SPDX-License-Identifier: Apache-2.0
// The two symbols that the library exports; IPluginRegistry::loadLibrary looks for them.
#include "creator.h"
#include "log.h"

#define FLASH_EXPORT_SYMBOL extern "C" __attribute__((visibility("default")))

FLASH_EXPORT_SYMBOL void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  flash_export::setLoggerFinder(finder);
}

FLASH_EXPORT_SYMBOL nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators) {
  using flash_export::AttentionCreator;
#define CREATOR(name, inputs, outputs) static AttentionCreator s##name{flash_export::Operator::k##name};
  FLASH_ATTENTION_ALL_OPERATORS(CREATOR)
#undef CREATOR
#define ADDRESS(name, inputs, outputs) &s##name,
  static nvinfer1::IPluginCreatorInterface* const sCreators[] = {FLASH_ATTENTION_ALL_OPERATORS(ADDRESS)};
#undef ADDRESS
  nbCreators = flash_export::kOperatorCount;
  return sCreators;
}
