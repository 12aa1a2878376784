// SPDX-License-Identifier: Apache-2.0
#include "launched.h"

#include <set>
#include <typeinfo>

#include "append.h"
#include "combine.h"
#include "emulation/launch_emulated.h"
#include "forward.h"

namespace kernel_tests {

std::string kernelsNotLaunched() {
  using namespace flash_export::kernels;
  using Half = flash_export::ops::Half;
  using BFloat = flash_export::ops::BFloat;
  using Float = float;
  struct {
    std::string name, type;
  } const all[] = {
#define FLASH_VARIANT(Element, head_dim, tile_q, tile_kv, warps, features) \
  {#Element #head_dim #features,                                           \
   typeid(Forward<Element, head_dim, tile_q, tile_kv, warps, Features::k##features>).name()},
#include "variants.inc"
#undef FLASH_VARIANT
      {"HalfCombine", typeid(Combine<Half>).name()},   {"BFloatCombine", typeid(Combine<BFloat>).name()},
      {"FloatCombine", typeid(Combine<Float>).name()}, {"HalfAppend", typeid(Append<Half>).name()},
      {"FloatAppend", typeid(Append<Float>).name()},
  };
  std::set<std::string> const launched = flash_export::emulation::launchedKernels();
  std::string missing;
  for (auto const& kernel : all) {
    if (launched.count(kernel.type) == 0) missing += " " + kernel.name;
  }
  return missing;
}

}  // namespace kernel_tests
