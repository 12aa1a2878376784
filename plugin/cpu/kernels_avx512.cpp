// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

namespace flash_export::cpu {

Kernels const& avx512Kernels() {
  static constexpr Kernels kKernels = kernelsNamed("avx512");
  return kKernels;
}

}  // namespace flash_export::cpu
