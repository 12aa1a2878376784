// SPDX-License-Identifier: Apache-2.0
// The two symbols that the library exports; IPluginRegistry::loadLibrary looks for them.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>

#include "creator.h"
#include "log.h"

#define FLASH_EXPORT_SYMBOL extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<bool> gAsked{false};  // whether anybody has asked for the creators

// A host that only opens this library runs every node's function body, without a word: say so at the end.
__attribute__((destructor)) void tellIfNobodyAsked() {
  if (gAsked) return;
  for (char const* host : {"libnvinfer.so.11", "libnvinfer.so.10", "libtensorrt_rtx.so.1",
                           "libnvinfer_lean.so.11", "libnvinfer_lean.so.10"}) {
    if (void* const handle = dlopen(host, RTLD_LAZY | RTLD_NOLOAD)) {
      dlclose(handle);
      flash_export::PluginError const error("the plugin library was opened and never used", host,
                                            "nobody who asked for its operators",
                                            "a registry that loads it: IPluginRegistry::loadLibrary",
                                            "where a host only opens libraries, give it "
                                            "libflash_attention_autoload.so, which lies beside this one");
      std::fprintf(stderr, "flash_export plugin: warning: %s\n", error.what());
      return;
    }
  }
}

}  // namespace

FLASH_EXPORT_SYMBOL void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  flash_export::setLoggerFinder(finder);
}

FLASH_EXPORT_SYMBOL nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators) {
  using flash_export::AttentionCreator;
  gAsked = true;
#define CREATOR(name, inputs, outputs) static AttentionCreator s##name{flash_export::Operator::k##name};
  FLASH_ATTENTION_ALL_OPERATORS(CREATOR)
#undef CREATOR
#define ADDRESS(name, inputs, outputs) &s##name,
  static nvinfer1::IPluginCreatorInterface* const sCreators[] = {FLASH_ATTENTION_ALL_OPERATORS(ADDRESS)};
#undef ADDRESS
  nbCreators = flash_export::kOperatorCount;
  return sCreators;
}
