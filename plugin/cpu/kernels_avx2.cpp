// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

namespace flash_export::cpu {

Kernels const& avx2Kernels() {
  static constexpr Kernels kKernels = kernelsNamed("avx2");
  return kKernels;
}

}  // namespace flash_export::cpu
