// SPDX-License-Identifier: Apache-2.0
// Starts a kernel, which is a class with a function run(Params), one way under nvcc and one way in the
// emulation.
#pragma once
#include "device_ops.h"
#include "launch.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <typeinfo>

#include "emulation/launch_emulated.h"
#endif

namespace flash_export::kernels {

#ifdef __CUDACC__

template <class Kernel, int kThreads, class Params>
__global__ void __launch_bounds__(kThreads, 1) forwardKernel(__grid_constant__ Params const params) {
  Kernel::run(params);
}

// Above 48 KB of shared memory a kernel must opt in; the call is a host-side setting of the current device,
// allowed in graph capture.
template <class Kernel, int kThreads, int kSharedBytes, class Params>
int start(Params const& params, int64_t blocks, void* stream) {
  auto const kernel = forwardKernel<Kernel, kThreads, Params>;
  if (kSharedBytes > 0) {
    cudaError_t const allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (allowed != cudaSuccess) return allowed;
  }
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(reinterpret_cast<void const*>(kernel), dim3(unsigned(blocks)), dim3(kThreads),
                          arguments, kSharedBytes, static_cast<cudaStream_t>(stream));
}

#else

template <class Kernel, int kThreads, int kSharedBytes, class Params>
int start(Params const& params, int64_t blocks, void*) {
  return emulation::launch(params, sizeof(typename Kernel::Element), blocks, kThreads, kSharedBytes,
                           &Kernel::run, typeid(Kernel).name());
}

#endif

}  // namespace flash_export::kernels
