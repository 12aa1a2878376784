// SPDX-License-Identifier: Apache-2.0
// The operator on a CPU: the arguments of kernels/flash_attention.h with host pointers, and someone's
// threads.
#pragma once
#include <cstddef>

#include "kernels/flash_attention.h"
#include "rows.h"

namespace flash_export::cpu {

// Runs body(user, i) for every i in 0 <= i < count, on whatever threads the host has, and waits.
struct Parallel {
  void* host;
  void (*run)(void* host, void (*body)(void* user, size_t i), size_t count, void* user);
};

// Computes `args`, which flashAttentionWhyUnsupported (this library's) does not refuse. Throws
// std::bad_alloc.
void attention(FlashAttentionArgs const& args, Parallel const& parallel, Kernels const& kernels);

// Up to so many rows of a key head `kernels` attend in slices, on a machine with so many processors.
int64_t mostSliceRows(FlashAttentionArgs const& args, Kernels const& kernels, int64_t processors);

// The fastest kernels that this processor runs.
Kernels const& bestKernels();

// Kernels by name, for tests; null: there are none of that name, or this processor does not run them.
Kernels const* kernelsNamed(char const* name);

}  // namespace flash_export::cpu
