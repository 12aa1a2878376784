// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime's calls that the sample makes, on host memory, as strict as a GPU where a mistake would
// show there: nothing that a stream is asked for happens before it is waited for, memory is poisoned when it
// is handed out, and copies stay inside a buffer. FAKE_CUDA_FAILS names one call that fails. At the end of
// the process it says on stderr what was not given back.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

namespace {

struct State {
  std::map<char*, size_t> buffers;
  std::vector<std::function<void()>> asked;
  int streams = 0;

  ~State() { std::fprintf(stderr, "fake cuda: %zu buffers and %d streams left\n", buffers.size(), streams); }
};
State gState;

bool fails(char const* call) {
  char const* const named = std::getenv("FAKE_CUDA_FAILS");
  return named != nullptr && std::strcmp(named, call) == 0;
}

void requireBuffer(void const* address, size_t size) {
  auto const found = gState.buffers.find(static_cast<char*>(const_cast<void*>(address)));
  if (found == gState.buffers.end() || found->second < size) {
    std::fprintf(stderr, "fake cuda: a copy of %zu bytes leaves its buffer\n", size);
    std::_Exit(98);
  }
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return fails("cudaGetDeviceCount") ? cudaErrorNoDevice : cudaSuccess;
}

char const* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "out of memory" : "a failure of the test's";
}

cudaError_t cudaMalloc(void** address, size_t size) {
  if (fails("cudaMalloc")) return cudaErrorMemoryAllocation;
  char* const made = static_cast<char*>(std::malloc(size));
  std::memset(made, 0xA5, size);
  gState.buffers[made] = size;
  *address = made;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  requireBuffer(address, 0);
  gState.buffers.erase(static_cast<char*>(address));
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  if (fails("cudaStreamCreate")) return cudaErrorUnknown;
  ++gState.streams;
  *stream = reinterpret_cast<cudaStream_t>(&gState);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t) {
  --gState.streams;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
  if (fails("cudaMemcpyAsync")) return cudaErrorUnknown;
  requireBuffer(kind == cudaMemcpyHostToDevice ? to : from, size);
  gState.asked.emplace_back([=] { std::memcpy(to, from, size); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  gState.asked.emplace_back([=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
  if (fails("cudaStreamSynchronize")) return cudaErrorUnknown;
  for (std::function<void()> const& work : gState.asked) work();
  gState.asked.clear();
  return cudaSuccess;
}

}  // extern "C"
