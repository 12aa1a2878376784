// SPDX-License-Identifier: Apache-2.0
// A TensorRT of whatever version FAKE_TENSORRT_VERSION says, whose registry must not be touched.
#include <cstdint>
#include <cstdlib>

extern "C" int32_t getInferLibVersion() noexcept { return std::atoi(std::getenv("FAKE_TENSORRT_VERSION")); }

extern "C" void* getPluginRegistry() noexcept {
  static char* sNoTable = nullptr;  // following it as a virtual table ends the process
  return &sNoTable;
}
