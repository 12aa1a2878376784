// SPDX-License-Identifier: Apache-2.0
// exp and tanh of vectors, to a few units in the last place.
#pragma once
#include "simd.h"

namespace flash_export::cpu {
namespace {

// e^x for x <= 88, to 3 + 1.25 |x| units in the last place where the result is a normal number: where
// it is 1 at most no error is above 3 * 2^-24. At most 2^-126 where it is none, 0 for -inf, 1
// for 0, NaN for NaN. The products need the same units of the processor as this, so every operation counts.
FLASH_INLINE Floats expOf(Floats x) {
  Floats t = x * 1.44269504f;  // e^x = 2^t
#if defined(__AVX512DQ__)
  __asm__("" : "+v"(t));  // or x * log2(e) might be fused into t - f below, which must be a whole number
  // t less the nearest integer; 0 for -inf.
  Floats const f = _mm512_maskz_reduce_ps(0xffff, t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // Adding it leaves round(t) + 127 in the low bits: the exponent field of 2^round(t).
  constexpr float kRound = 12582912.0f + 127.0f;
  t = larger(splat(-127.0f), t);
  Floats const rounded = t + kRound;
  Floats const f = t - (rounded - kRound);  // -0.5 to 0.5
#endif
  // 2^f, fitted to a relative error of 1e-7; in pairs, whose latencies overlap.
  Floats const f2 = f * f;
  Floats const low = f * 0x1.62e42ap-1f + 1.0f;
  Floats const middle = f * 0x1.c6b752p-5f + 0x1.ebf9bcp-3f;
  Floats const high = f * 0x1.5bba14p-10f + 0x1.3cea88p-7f;
  Floats const power = f2 * (f2 * high + middle) + low;
#if defined(__AVX512DQ__)
  return _mm512_maskz_scalef_ps(0xffff, power, t - f);
#else
  // A product, not an addition to the exponent's bits: a NaN must stay one.
  return power * floatsOf(bitsOf(rounded) << 23);
#endif
}

FLASH_INLINE float expOf(float x) { return expOf(splat(x))[0]; }

// What a row's weights are taken beside once its scores are at most `most`: what they were before, until that
// is more than 1 below. So a sum shrinks by 1, or by less than 1/e: a maximum that rises a little with every
// run of keys would round it as often.
template <class Number>
FLASH_INLINE Number baseOf(Number before, Number most) {
  return most - before > 1.0f ? most : before;  // exact near each other, where before + 1 may be rounded up
}

// What a row's keys come to when its sink joins them: row_max of both, the row's sum beside that, and the
// share that weights beside the keys' own maximum have of it.
struct Joined {
  float row_max, row_sum, share;
};

// `most` and `sum`: of the keys, -inf and 0 for none. In fp64: where a sink is far above the scores, the
// share is e to a large number, of which fp32's exponential keeps fewer digits.
FLASH_INLINE Joined joinSink(float most, float sum, float sink) {
  if (sink == -kInfinity) return {most, sum, sum == 0.0f ? 0.0f : 1.0f / sum};
  float const row_max = most > sink ? most : sink;
  double const weight = __builtin_exp(double(most) - double(row_max));
  double const all = sum * weight + __builtin_exp(double(sink) - double(row_max));
  return {row_max, float(all), float(weight / all)};
}

// So many weights are added to one another before they are to a row's sum. Added one by one equal weights are
// rounded the same way each time: the sum of 128 was off by 20 units in the last place.
constexpr int kSummed = 8;

// tanh, odd by construction. Below 0.6 a polynomial: (1 - e) / (1 + e) would lose the digits of small x.
FLASH_INLINE Floats tanhOf(Floats x) {
  Words const sign = bitsOf(x) & 0x80000000u;
  Floats const magnitude = floatsOf(bitsOf(x) ^ sign);
  Floats const e = expOf(magnitude * -2.0f);
  Floats const far = (1.0f - e) / (1.0f + e);
  Floats const square = x * x;
  Floats series = square * 0x1.33bae0p-9f - 0x1.12f86cp-7f;  // of (tanh(x) / x - 1) / x^2, fitted to 1e-9
  series = square * series + 0x1.64e4fep-6f;
  series = square * series - 0x1.ba0c5ap-5f;
  series = square * series + 0x1.1110f2p-3f;
  series = square * series - 0x1.555554p-2f;
  Floats const near = magnitude + magnitude * square * series;
  return floatsOf(bitsOf(magnitude < 0.6f ? near : far) | sign);
}

}  // namespace
}  // namespace flash_export::cpu
