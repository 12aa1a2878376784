// SPDX-License-Identifier: Apache-2.0
// Which kernels a session runs: the fastest, or those that the user names.
#pragma once
#include "rows.h"

namespace flash_export::cpu {

// An environment variable; "avx512", "avx2" or "plain" lowers the instruction set, unset or empty is the
// best one.
constexpr char kTargetVariable[] = "FLASH_TRT_CPU_TARGET";

// Throws PluginError where the variable names no kernels that this processor runs.
Kernels const& chosenKernels();

}  // namespace flash_export::cpu
