// SPDX-License-Identifier: Apache-2.0
// Compiles the variants of one element type and feature class. A translation unit says which before it
// includes this:
//
//   #define FLASH_COMPILE_Half_Plain FLASH_COMPILE_VARIANT
//   #include "instantiate.h"
#pragma once
#include "forward.h"
#include "launch.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "emulation/launch_emulated.h"
#endif

namespace flash_export::kernels {

using Half = ops::Half;
using BFloat = ops::BFloat;
using Float = float;

#ifdef __CUDACC__

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Shape::kThreads, 1)
    forwardKernel(__grid_constant__ ForwardParams const params) {
  Kernel::run(params);
}

// Above 48 KB of shared memory a kernel must opt in; the call is a host-side setting of the current device,
// allowed in graph capture.
template <class Kernel>
int launchForward(ForwardParams const& params, int64_t blocks, void* stream) {
  auto const kernel = forwardKernel<Kernel>;
  cudaError_t const allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::Shape::kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  void* arguments[] = {const_cast<ForwardParams*>(&params)};
  return cudaLaunchKernel(reinterpret_cast<void const*>(kernel), dim3(unsigned(blocks)),
                          dim3(Kernel::Shape::kThreads), arguments, Kernel::Shape::kSharedBytes,
                          static_cast<cudaStream_t>(stream));
}

#else

template <class Kernel>
int launchForward(ForwardParams const& params, int64_t blocks, void*) {
  return emulation::launch(params, sizeof(typename Kernel::Element), blocks, Kernel::Shape::kThreads,
                           Kernel::Shape::kSharedBytes, &Kernel::run);
}

#endif

#define FLASH_COMPILE_VARIANT(Element, head_dim, tile_q, tile_kv, warps, features)                   \
  int FLASH_LAUNCHER(Element, head_dim, features)(ForwardParams const& params, int64_t blocks,       \
                                                  void* stream) {                                    \
    return launchForward<Forward<Element, head_dim, tile_q, tile_kv, warps, Features::k##features>>( \
        params, blocks, stream);                                                                     \
  }
#define FLASH_SKIP_VARIANT(...)

#ifndef FLASH_COMPILE_Half_Plain
#define FLASH_COMPILE_Half_Plain FLASH_SKIP_VARIANT
#endif
#ifndef FLASH_COMPILE_Half_General
#define FLASH_COMPILE_Half_General FLASH_SKIP_VARIANT
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
