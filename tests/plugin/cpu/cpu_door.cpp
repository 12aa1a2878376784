// SPDX-License-Identifier: Apache-2.0
// The operator on a CPU with a C interface, and threads of its own: what the tests call through ctypes.
#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "append.h"
#include "attention.h"

namespace {

using flash_export::cpu::Kernels;

// Runs the bodies on `*host` threads, in an order that the threads settle between them.
void runOnThreads(void* host, void (*body)(void*, size_t), size_t count, void* user) {
  std::atomic<size_t> next{0};
  auto const drain = [&] {
    for (size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) body(user, i);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < *static_cast<int*>(host); ++i) threads.emplace_back(drain);
  drain();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

#define DOOR extern "C" __attribute__((visibility("default")))

// Whether this processor runs these kernels: 1 or 0.
DOOR int cpuHasKernels(char const* name) { return flash_export::cpu::kernelsNamed(name) != nullptr; }

// Computes `args`. way: 0 as the kernels choose, 1 everything in tiles, 2 everything in slices. Returns 0, or
// 1 where an exception came.
DOOR int cpuAttention(FlashAttentionArgs const* args, char const* name, int way, int threads) {
  try {
    Kernels kernels = *flash_export::cpu::kernelsNamed(name);
    if (way == 1) kernels.slice_rows = 0;
    if (way == 2) kernels.slice_rows = 1 << 20;
    flash_export::cpu::attention(*args, {&threads, runOnThreads}, kernels);
    return 0;
  } catch (std::exception const&) {
    return 1;
  }
}

// How many rows of a key head are slices on a machine with so many processors.
DOOR int64_t cpuMostSliceRows(FlashAttentionArgs const* args, char const* name, int64_t processors) {
  return flash_export::cpu::mostSliceRows(*args, *flash_export::cpu::kernelsNamed(name), processors);
}

// Writes a cache's new rows. Returns 0, or 1 where an exception came.
DOOR int cpuAppend(FlashAppendArgs const* args) {
  try {
    flash_export::cpu::append(*args);
    return 0;
  } catch (std::exception const&) {
    return 1;
  }
}
