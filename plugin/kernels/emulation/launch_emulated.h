// SPDX-License-Identifier: Apache-2.0
// Runs a kernel in the emulation, with the tensors of its parameters as the only global memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "../append_params.h"
#include "../forward_params.h"

extern "C" {
// What the last launch of this host thread that was not refused found, "" when nothing. Valid until the next
// launch of this thread.
char const* flashEmulationError();
// Bank conflicts of ldmatrix in the last launch of this host thread.
uint64_t flashEmulationBankConflicts();
}

namespace flash_export::emulation {

// Returns 0, or 719 (cudaErrorLaunchFailure) with the fault in flashEmulationError(). The schedule is drawn
// from the environment variable FLASH_EMULATION_SEED, else at random; the error names the seed that repeats
// it.
int launch(kernels::ForwardParams const& params, size_t element_bytes, int64_t blocks, int threads,
           int shared_bytes, void (*kernel)(kernels::ForwardParams const&), char const* name);
int launch(kernels::AppendParams const& params, size_t element_bytes, int64_t blocks, int threads,
           int shared_bytes, void (*kernel)(kernels::AppendParams const&), char const* name);

// While it lives, an access of this host thread's launches to this memory is a fault, whatever tensors they
// name: for memory around what a caller was told to give.
class GuardBand {
 public:
  GuardBand(void const* begin, size_t bytes);
  ~GuardBand();
  GuardBand(GuardBand const&) = delete;
  GuardBand& operator=(GuardBand const&) = delete;

 private:
  void const* mBegin;
};

// The names of all kernels that were launched in this process, as typeid has them.
std::set<std::string> launchedKernels();

}  // namespace flash_export::emulation
