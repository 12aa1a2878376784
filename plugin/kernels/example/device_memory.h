/* SPDX-License-Identifier: Apache-2.0
 *
 * The examples' memory: a GPU's, or with FLASH_ON_HOST the host's, for the emulated kernels. What fails ends
 * the program with what CUDA says of it.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef FLASH_ON_HOST
#include <string.h>
char const* flashEmulationError(void); /* emulation/launch_emulated.h */
static char const* error_text(int32_t status) {
  if (status == 719) return flashEmulationError();
  return status == 2 ? "out of memory" : "invalid argument";
}
#else
#include <cuda_runtime_api.h>
static char const* error_text(int32_t status) { return cudaGetErrorString((cudaError_t)status); }
#endif

/* `status` is a cudaError_t: of the CUDA runtime, or of the kernels. */
static void must(int32_t status, char const* what) {
  if (status == 0) return;
  fprintf(stderr, "cannot %s: error %d: %s\n", what, status, error_text(status));
  exit(1);
}

static void* allocate(size_t bytes) {
  void* p = NULL;
#ifdef FLASH_ON_HOST
  p = malloc(bytes);
  must(p == NULL ? 2 : 0, "allocate memory");
#else
  must(cudaMalloc(&p, bytes), "allocate device memory");
#endif
  return p;
}

/* Waits for what the stream has to do before. */
static void copy(void* to, void const* from, size_t bytes) {
#ifdef FLASH_ON_HOST
  memcpy(to, from, bytes);
#else
  must(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy (or run what was launched before)");
#endif
}
