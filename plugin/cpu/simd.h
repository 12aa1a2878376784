// SPDX-License-Identifier: Apache-2.0
// Vectors of floats in the compiler's own vector types (GCC and Clang), as wide as the instruction set that
// the source is compiled for; rows.h says why everything here is local to the source.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
// The forms with a mask, of which every lane is set: GCC 12 warns of what the plain ones leave undefined.
#endif

#include "kernels/flash_attention.h"

namespace flash_export::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

#define FLASH_INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef Floats FloatsAnywhere __attribute__((aligned(4), may_alias));
typedef Shorts ShortsAnywhere __attribute__((aligned(2), may_alias));

constexpr float kInfinity = __builtin_inff();

FLASH_INLINE Floats splat(float x) { return x - Floats{}; }  // x - 0 is x, -0 and NaN too
FLASH_INLINE Ints splat(int32_t x) { return x - Ints{}; }
FLASH_INLINE Words bitsOf(Floats x) { return (Words)x; }
FLASH_INLINE Floats floatsOf(Words x) { return (Floats)x; }
// A NaN in b is b's, a NaN in a is dropped: what the x86 instruction does.
FLASH_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
FLASH_INLINE int32_t smallerOf(int32_t a, int32_t b) { return a < b ? a : b; }
FLASH_INLINE int32_t largerOf(int32_t a, int32_t b) { return a > b ? a : b; }
constexpr int64_t roundUp(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

FLASH_INLINE Floats load(float const* p) { return *reinterpret_cast<FloatsAnywhere const*>(p); }
FLASH_INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsAnywhere*>(p) = x; }

FLASH_INLINE Floats magnitudeOf(Floats x) { return floatsOf(bitsOf(x) & 0x7fffffffu); }

// 2^n for -126 <= n <= 127.
FLASH_INLINE float powerOfTwo(int32_t n) {
  uint32_t const bits = uint32_t(n + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// n of 2^n <= |x| < 2^(n+1) for a normal number; -127 for a smaller one.
FLASH_INLINE int32_t exponentOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return int32_t((bits >> 23) & 0xffu) - 127;
}

// Adds x to a sum of two parts that is multiplied by `shrink` first: `low` is what `high` has lost by
// rounding (Knuth 1969, The Art of Computer Programming 2, 4.2.2, theorem B). float or Floats.
template <class Number>
FLASH_INLINE void addTo(Number& high, Number& low, Number shrink, Number x) {
  Number const before = high * shrink;
  high = before + x;
  Number const added = high - before;
  low = low * shrink + ((before - (high - added)) + (x - added));
}

// What both parts come to. Where `high` is no finite number, `low` is NaN.
template <class Number>
FLASH_INLINE Number wholeOf(Number high, Number low) {
  Number const whole = high + low;
  return whole == whole ? whole : high;
}

FLASH_INLINE Ints laneNumbers() {
  Ints n{};
  for (int i = 0; i < kLanes; ++i) n[i] = i;
  return n;
}

// The 16-bit element types; float stands for itself.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

FLASH_INLINE Floats load(BFloat const* p) {
  return floatsOf(__builtin_convertvector(*reinterpret_cast<ShortsAnywhere const*>(p), Words) << 16);
}

// A session may have the processor take subnormal floats for 0: a subnormal half is none, and stays.
#if defined(__AVX512F__)
FLASH_INLINE Floats load(Half const* p) {
  return _mm512_maskz_cvtph_ps(0xffff, (__m256i) * reinterpret_cast<ShortsAnywhere const*>(p));
}
#elif defined(__F16C__)
FLASH_INLINE Floats load(Half const* p) {
  return _mm256_cvtph_ps((__m128i) * reinterpret_cast<ShortsAnywhere const*>(p));
}
#else
FLASH_INLINE Floats load(Half const* p) {
  Words const bits = __builtin_convertvector(*reinterpret_cast<ShortsAnywhere const*>(p), Words);
  Words const magnitude = (bits & 0x7fffu) << 13;
  // With the other bias a normal half is right, and one of exponent 0 is 2^-15 + m 2^-25 for m 2^-24. Twice
  // that less 2^-14 is right for the latter, and no less for the former. No operand is a subnormal float.
  Floats const normal = floatsOf(magnitude + 0x38000000u), subnormal = normal * 2.0f - 0x1p-14f;
  Words const finite = bitsOf(subnormal < normal ? subnormal : normal);
  Words const odd = Words(Ints(magnitude) >= 0x0f800000) & 0x7f800000u;  // of an infinity or a NaN
  return floatsOf(finite | odd | (bits & 0x8000u) << 16);
}
#endif

FLASH_INLINE void store(BFloat* p, Floats x) {
  Words const bits = bitsOf(x);
  Words const rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  Words const result = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded;
  *reinterpret_cast<ShortsAnywhere*>(p) = __builtin_convertvector(result, Shorts);
}

FLASH_INLINE void store(Half* p, Floats x) {
  Words const bits = bitsOf(x), magnitude = bits & 0x7fffffffu;
  Words const rebased = magnitude - 0x38000000u;
  Words const normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  // Beside 0.5 one unit in the last place is the smallest subnormal half: the addition rounds.
  Words const subnormal = bitsOf(floatsOf(magnitude) + 0.5f) - 0x3f000000u;
  Words result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? Words{} + 0x7c00u : result;
  result = magnitude > 0x7f800000u ? Words{} + 0x7e00u : result;
  *reinterpret_cast<ShortsAnywhere*>(p) = __builtin_convertvector(result | ((bits >> 16) & 0x8000u), Shorts);
}

// The first `count` elements, 0 behind them.
template <class Element>
FLASH_INLINE Floats loadSome(Element const* p, int count) {
  Element some[kLanes] = {};
  for (int i = 0; i < count; ++i) some[i] = p[i];
  return load(some);
}

template <class Element>
FLASH_INLINE void storeSome(Element* p, Floats x, int count) {
  Element some[kLanes];
  store(some, x);
  for (int i = 0; i < count; ++i) p[i] = some[i];
}

template <class Element>
FLASH_INLINE float loadOne(Element const* p) {
  return loadSome(p, 1)[0];
}
FLASH_INLINE float loadOne(float const* p) { return *p; }

// Interleaves the lower (or upper) halves of a and b: a0 b0 a1 b1 ...
template <bool kUpper>
FLASH_INLINE Floats interleave(Floats a, Floats b) {
  Words index{};
  for (int i = 0; i < kLanes; ++i) index[i] = uint32_t((kUpper ? kLanes / 2 : 0) + i / 2 + (i % 2) * kLanes);
#if defined(__clang__)
  Floats result{};
  for (int i = 0; i < kLanes; ++i) result[i] = index[i] < kLanes ? a[index[i]] : b[index[i] - kLanes];
  return result;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// Transposes a square of kLanes vectors in place.
FLASH_INLINE void transpose(Floats (&square)[kLanes]) {
  for (int step = 1; step < kLanes; step *= 2) {
    Floats next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave<false>(square[i], square[i + kLanes / 2]);
      next[2 * i + 1] = interleave<true>(square[i], square[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = next[i];
  }
}

// The sums over the lanes of kLanes vectors, as one vector.
FLASH_INLINE Floats sumsOf(Floats (&vectors)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      vectors[i] =
          interleave<false>(vectors[i], vectors[i + half]) + interleave<true>(vectors[i], vectors[i + half]);
    }
  }
  return vectors[0];
}

}  // namespace
}  // namespace flash_export::cpu
