// SPDX-License-Identifier: Apache-2.0
// Everything a kernel asks of the device, in one interface with two implementations: inline PTX under nvcc,
// and an emulation under any other C++ compiler (emulation/README.md). Kernel source calls ops:: and nothing
// else of either, so the very same source runs on a GPU and, lane by lane and checked, on a CPU.
//
//   Half, BFloat                     16-bit element types; float is the third
//   threadIndex() lane() warp()      place in the block
//   blockIndex()                     the block's number in a one-dimensional grid
//   sharedBase()                     address of the block's dynamic shared memory, aligned to 1024
//   syncThreads() syncWarp()         barriers that order shared memory
//   shuffleXor(v, mask)              the value of lane ^ mask; shuffle(v, lane): that of `lane`
//   anyLane(b)                       whether b holds in any lane of the warp
//   ldmatrix(r, a)                   four 8x8 matrices of 16-bit elements; lane i gives the address of row i
//   % 8 of ldmatrixTransposed(r, a)         matrix i / 8 mma<T>(d, a, b0, b1)             d[16x8] += a[16x16]
//   . b[16x8], T 16-bit, fp32 accumulators copyAsync(dst, src, bytes)       16 bytes global -> shared: the
//   first `bytes` (0..16) copied, the rest zeroed;
//                                    both 16-byte aligned. Seen after copyAsyncWait<n>() (all but the newest
//                                    n commits
//   copyAsyncCommit()                of this thread have landed) and, by other threads, after a barrier
//   behind that loadShared64/128 storeShared32/64/128, loadGlobal128 storeGlobal128 loadGlobal(p)     float
//   or int32 loadBits(p) storeBits(p, bits)   one element of any type as its bits; loadFloat(p): as a float
//   packPair<T>(lo, hi)              two floats rounded to two 16-bit elements
//   exp2Approx log2Approx            the fast units: 2 ulp; 2^-22 absolute near 1. Subnormals are zero
//   tanhPrecise multiplyAdd maximum roundedDivide bitsOf floatOf
#pragma once
#include <cstdint>

namespace flash_export::ops {

struct alignas(16) Words4 {
  uint32_t w[4];
};
struct alignas(8) Words2 {
  uint32_t w[2];
};

}  // namespace flash_export::ops

#ifdef __CUDACC__
#include "device_ops_cuda.h"
#else
#include "emulation/device_ops_emulated.h"
#endif
