// SPDX-License-Identifier: Apache-2.0
// Which kernels this processor runs.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>
#include <initializer_list>

#include "attention.h"

namespace flash_export::cpu {

#if defined(__x86_64__)
namespace {

// Not every compiler's __builtin_cpu_supports knows its name. Asked once: virtual machines take 10 us for it.
bool hasF16c() {
  static bool const has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  }();
  return has;
}

bool runsAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && hasF16c(); }

bool runsAvx512() {
  return runsAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

Kernels const* kernelsNamed(char const* name) {
  if (std::strcmp(name, "avx512") == 0) return runsAvx512() ? &avx512Kernels() : nullptr;
  if (std::strcmp(name, "avx2") == 0) return runsAvx2() ? &avx2Kernels() : nullptr;
  return std::strcmp(name, "plain") == 0 ? &plainKernels() : nullptr;
}
#else
Kernels const* kernelsNamed(char const* name) {
  return std::strcmp(name, "plain") == 0 ? &plainKernels() : nullptr;
}
#endif

Kernels const& bestKernels() {
  static Kernels const& best = [&]() -> Kernels const& {
    for (char const* name : {"avx512", "avx2"}) {
      if (Kernels const* const kernels = kernelsNamed(name)) return *kernels;
    }
    return plainKernels();
  }();
  return best;
}

}  // namespace flash_export::cpu
