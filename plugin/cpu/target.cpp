// SPDX-License-Identifier: Apache-2.0
#include "target.h"

#include <cstdlib>
#include <string>

#include "attention.h"
#include "log.h"

namespace flash_export::cpu {

Kernels const& chosenKernels() {
  char const* const name = std::getenv(kTargetVariable);
  if (name == nullptr || *name == '\0') return bestKernels();
  if (Kernels const* const kernels = kernelsNamed(name)) return *kernels;
  std::string here;
  for (char const* known : {"avx512", "avx2", "plain"}) {
    if (kernelsNamed(known) != nullptr) here += (here.empty() ? "" : ", ") + std::string{known};
  }
  throw PluginError("cannot choose the kernels of FlashAttention on this CPU",
                    std::string{"environment variable "} + kTargetVariable, std::string{"\""} + name + "\"",
                    "one that this processor runs: " + here, "name one of them, or leave the variable unset");
}

}  // namespace flash_export::cpu
