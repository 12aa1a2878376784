// SPDX-License-Identifier: Apache-2.0
// Everything of one instruction set, for the kernels_*.cpp: each is this header under its own compiler flags.
#pragma once
#include "slice_kernel.h"
#include "tile_kernel.h"

namespace flash_export::cpu {
namespace {

constexpr Kernels kernelsNamed(char const* name) {
  return {name,  kStripRows,   kStrips * kStripRows, kSliceRows, tile,          tileScratch,
          slice, sliceScratch, partialSize,          combine,    combineScratch};
}

}  // namespace
}  // namespace flash_export::cpu
