// SPDX-License-Identifier: Apache-2.0
// Compiles the variants of one element type and feature class. A translation unit says which before it
// includes this:
//
//   #define FLASH_COMPILE_Half_Plain FLASH_COMPILE_VARIANT
//   #include "instantiate.h"
#pragma once
#include "forward.h"
#include "start.h"

namespace flash_export::kernels {

using Half = ops::Half;
using BFloat = ops::BFloat;
using Float = float;

#define FLASH_COMPILE_VARIANT(Element, head_dim, tile_q, tile_kv, warps, features)                      \
  int FLASH_LAUNCHER(Element, head_dim, features)(ForwardParams const& params, int64_t blocks,          \
                                                  void* stream) {                                       \
    using Kernel = Forward<Element, head_dim, tile_q, tile_kv, warps, Features::k##features>;           \
    return start<Kernel, Kernel::Shape::kThreads, Kernel::Shape::kSharedBytes>(params, blocks, stream); \
  }
#define FLASH_SKIP_VARIANT(...)

#ifndef FLASH_COMPILE_Half_Plain
#define FLASH_COMPILE_Half_Plain FLASH_SKIP_VARIANT
#endif
#ifndef FLASH_COMPILE_Half_General
#define FLASH_COMPILE_Half_General FLASH_SKIP_VARIANT
#endif
#ifndef FLASH_COMPILE_Half_Paged
#define FLASH_COMPILE_Half_Paged FLASH_SKIP_VARIANT
#endif
#ifndef FLASH_COMPILE_BFloat_Paged
#define FLASH_COMPILE_BFloat_Paged FLASH_SKIP_VARIANT
#endif
#ifndef FLASH_COMPILE_BFloat_Plain
#define FLASH_COMPILE_BFloat_Plain FLASH_SKIP_VARIANT
#endif
#ifndef FLASH_COMPILE_BFloat_General
#define FLASH_COMPILE_BFloat_General FLASH_SKIP_VARIANT
#endif
#ifndef FLASH_COMPILE_Float_General
#define FLASH_COMPILE_Float_General FLASH_SKIP_VARIANT
#endif

#define FLASH_VARIANT(Element, head_dim, tile_q, tile_kv, warps, features) \
  FLASH_COMPILE_##Element##_##features(Element, head_dim, tile_q, tile_kv, warps, features)
#include "variants.inc"
#undef FLASH_VARIANT

}  // namespace flash_export::kernels
