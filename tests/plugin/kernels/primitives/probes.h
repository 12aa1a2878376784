// SPDX-License-Identifier: Apache-2.0
// Small kernels, one a primitive of device_ops.h or of what the kernels are made of: bytes in, bytes out.
// They are compiled for a GPU and for the emulation, so that the two can be compared
// (scripts/gpu_check_primitives.py).
//
// Each is a class with kName, kThreads, kSharedBytes, kInBytes, kOutBytes and run(ProbeParams); one block.
#pragma once
#include <type_traits>

#include "device_ops.h"
#include "softmax.h"

namespace flash_export::kernels {

struct ProbeParams {
  unsigned char const* in;
  unsigned char* out;
};

template <class T>
FLASH_DEVICE T const* inputAt(ProbeParams const& p, int byte) {
  return reinterpret_cast<T const*>(p.in + byte);
}
FLASH_DEVICE uint32_t inputWord(ProbeParams const& p, int index) {
  return uint32_t(ops::loadGlobal(inputAt<int32_t>(p, 0) + index));
}
FLASH_DEVICE float inputFloat(ProbeParams const& p, int index) { return ops::floatOf(inputWord(p, index)); }
FLASH_DEVICE void outputWord(ProbeParams const& p, int index, uint32_t word) {
  ops::storeBits(reinterpret_cast<int32_t*>(p.out) + index, word);
}
FLASH_DEVICE void outputFloat(ProbeParams const& p, int index, float x) {
  outputWord(p, index, ops::bitsOf(x));
}
FLASH_DEVICE void outputChunk(ProbeParams const& p, int index, ops::Words4 chunk) {
  ops::storeGlobal128(p.out + index * kChunkBytes, chunk);
}

// Four matrices, their rows at addresses in an order of their own.
template <bool kTransposed>
struct Ldmatrix {
  using Element = ops::Half;
  static constexpr char const* kName = kTransposed ? "ldmatrix_trans" : "ldmatrix";
  static constexpr int kThreads = 32, kSharedBytes = 1024, kInBytes = 512, kOutBytes = 512;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    int const lane = ops::lane();
    ops::storeShared128(ops::sharedBase() + lane * kChunkBytes,
                        ops::loadGlobal128(p.in + lane * kChunkBytes));
    ops::syncWarp();
    uint32_t const address = ops::sharedBase() + ((lane * 5 + 3) & 31) * kChunkBytes;
    uint32_t r[4];
    if constexpr (kTransposed) {
      ops::ldmatrixTransposed(r, address);
    } else {
      ops::ldmatrix(r, address);
    }
    outputChunk(p, lane, {{r[0], r[1], r[2], r[3]}});
  }
};

// A [32 lanes][4], B [32][2], C [32][4] -> D: which lane holds what, and the sums.
template <class T>
struct Mma {
  using Element = T;
  static constexpr bool kIsHalf = std::is_same<T, ops::Half>::value;
  static constexpr char const* kName = kIsHalf ? "mma_fp16" : "mma_bf16";
  static constexpr int kThreads = 32, kSharedBytes = 0, kInBytes = 32 * 40, kOutBytes = 512;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    int const lane = ops::lane();
    uint32_t a[4], b[2];
    float d[4];
    for (int i = 0; i < 4; ++i) a[i] = inputWord(p, lane * 4 + i);
    for (int i = 0; i < 2; ++i) b[i] = inputWord(p, 128 + lane * 2 + i);
    for (int i = 0; i < 4; ++i) d[i] = inputFloat(p, 192 + lane * 4 + i);
    ops::mma<T>(d, a, b[0], b[1]);
    for (int i = 0; i < 4; ++i) outputFloat(p, lane * 4 + i, d[i]);
  }
};

// Lane i copies i % 17 bytes over a pattern: the rest of the 16 is zero.
struct PartialCopies {
  using Element = ops::Half;
  static constexpr char const* kName = "copy_async";
  static constexpr int kThreads = 32, kSharedBytes = 1024, kInBytes = 512, kOutBytes = 512;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    int const lane = ops::lane();
    uint32_t const slot = ops::sharedBase() + lane * kChunkBytes;
    ops::storeShared128(slot, {{0x5a5a5a5a, 0x5a5a5a5a, 0x5a5a5a5a, 0x5a5a5a5a}});
    ops::copyAsync(slot, p.in + lane * kChunkBytes, lane % 17);
    ops::copyAsyncCommit();
    ops::copyAsyncWait<0>();
    outputChunk(p, lane, ops::loadShared128(slot));
  }
};

struct Exchanges {
  using Element = float;
  static constexpr char const* kName = "shuffles_and_vote";
  static constexpr int kWords = 8;
  static constexpr int kThreads = 64, kSharedBytes = 0, kInBytes = kThreads * 4,
                       kOutBytes = kThreads * kWords * 4;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    float const x = inputFloat(p, ops::threadIndex());
    int const first = ops::threadIndex() * kWords;
    for (int i = 0; i < 5; ++i) outputFloat(p, first + i, ops::shuffleXor(x, 1 << i));
    outputFloat(p, first + 5, ops::shuffle(x, ops::lane() * 7 + 3));
    outputWord(p, first + 6, ops::anyLane(x > 0.0f));  // of one warp in the inputs, not of the other
    outputWord(p, first + 7, ops::anyLane(ops::lane() == 31));
  }
};

// Act(x, y) of each of kCount pairs.
template <class Act>
struct Each {
  using Element = float;
  static constexpr char const* kName = Act::kName;
  static constexpr int kCount = 2048;
  static constexpr int kThreads = 128, kSharedBytes = 0, kInBytes = kCount * 8, kOutBytes = kCount * 4;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    for (int i = ops::threadIndex(); i < kCount; i += kThreads) {
      outputWord(p, i, Act::of(inputFloat(p, i), inputFloat(p, kCount + i)));
    }
  }
};

#define FLASH_EACH(Name, name, expression)                                                \
  struct Name {                                                                           \
    static constexpr char const* kName = name;                                            \
    static FLASH_DEVICE uint32_t of([[maybe_unused]] float x, [[maybe_unused]] float y) { \
      return expression;                                                                  \
    }                                                                                     \
  };
FLASH_EACH(Exp2, "exp2_approx", ops::bitsOf(ops::exp2Approx(x)))
FLASH_EACH(Log2, "log2_approx", ops::bitsOf(ops::log2Approx(y)))
FLASH_EACH(Tanh, "tanh", ops::bitsOf(ops::tanhPrecise(x)))
FLASH_EACH(Exp, "exp_precise", ops::bitsOf(expPrecise(x)))
FLASH_EACH(Divide, "divide", ops::bitsOf(ops::roundedDivide(x, y)))
FLASH_EACH(MultiplyAdd, "multiply_add", ops::bitsOf(ops::multiplyAdd(x, y, x)))
FLASH_EACH(Maximum, "maximum", ops::bitsOf(ops::maximum(x, y)))
FLASH_EACH(PackHalf, "pack_fp16", ops::packPair<ops::Half>(x, y))
FLASH_EACH(PackBFloat, "pack_bf16", ops::packPair<ops::BFloat>(x, y))
#undef FLASH_EACH

// Every 16-bit element as a float, four elements a lane and step.
template <class T>
struct Widen {
  using Element = T;
  static constexpr char const* kName = Mma<T>::kIsHalf ? "load_fp16" : "load_bf16";
  static constexpr int kCount = 8192;
  static constexpr int kThreads = 128, kSharedBytes = 0, kInBytes = kCount * 2, kOutBytes = kCount * 4;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    for (int i = ops::threadIndex(); i < kCount; i += kThreads) {
      outputFloat(p, i, ops::loadFloat(inputAt<T>(p, 0) + i));
    }
  }
};

}  // namespace flash_export::kernels
