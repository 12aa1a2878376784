/* SPDX-License-Identifier: Apache-2.0
 *
 * The examples' memory: a GPU's, or with FLASH_ON_HOST the host's, for the emulated kernels.
 */
#pragma once
#include <stddef.h>
#include <stdlib.h>

#ifdef FLASH_ON_HOST
#include <string.h>
static void* allocate(size_t bytes) { return malloc(bytes); }
static int copy(void* to, void const* from, size_t bytes) { return memcpy(to, from, bytes) == NULL; }
#else
#include <cuda_runtime_api.h>
static void* allocate(size_t bytes) {
  void* p = NULL;
  return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}
/* Waits for what the stream has to do before. */
static int copy(void* to, void const* from, size_t bytes) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault) != cudaSuccess;
}
#endif
