// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

namespace flash_export::cpu {

Kernels const& plainKernels() {
  static constexpr Kernels kKernels = kernelsNamed("plain");
  return kKernels;
}

}  // namespace flash_export::cpu
