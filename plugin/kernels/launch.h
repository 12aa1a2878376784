// SPDX-License-Identifier: Apache-2.0
// Starts one compiled kernel: on a CUDA stream under nvcc, in the emulation otherwise. Each variant of
// variants.inc becomes one function of the type Launcher, named by FLASH_LAUNCHER; dispatch.cpp sees only
// those.
#pragma once
#include "append_params.h"
#include "forward_params.h"

namespace flash_export::kernels {

// Returns a cudaError_t; 0: enqueued.
using Launcher = int (*)(ForwardParams const& params, int64_t blocks, void* stream);

// Puts the splits of a launch together (combine.h); the same stream, behind it.
int launchCombine(int32_t dtype, ForwardParams const& params, void* stream);

// Writes new keys and values into a cache (append.h).
int launchAppend(int32_t dtype, AppendParams const& params, void* stream);

// Of the current device; 0: it does not say.
int countMultiprocessors();

#define FLASH_LAUNCHER(Element, head_dim, features) launch##Element##head_dim##features

}  // namespace flash_export::kernels
