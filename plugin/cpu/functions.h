// SPDX-License-Identifier: Apache-2.0
// exp and tanh of vectors, to a few units in the last place.
#pragma once
#include "simd.h"

namespace flash_export::cpu {
namespace {

// e^x for x <= 88, to 3 units in the last place above -8 (8 without fused products), where a softmax's weight
// is; 1 for 0, exactly 0 from -88.03 down (so for -inf too), NaN for NaN.
FLASH_INLINE Floats expOf(Floats x) {
  constexpr float kLog2E = 1.44269504f;
  // Adding it leaves round(x) + 127 in the low bits: the exponent field of 2^round(x).
  constexpr float kRound = 12582912.0f + 127.0f;
  x = larger(splat(-88.0297f), x);
  Floats const rounded = x * kLog2E + kRound;
  Floats const f = x * kLog2E - (rounded - kRound);  // -0.5 to 0.5
  // 2^f, fitted to a relative error of 1e-9; in pairs, whose latencies overlap.
  Floats const f2 = f * f;
  Floats const low = f * 0x1.62e430p-1f + 1.0f;
  Floats const middle = f * 0x1.c6aee8p-5f + 0x1.ebfbdcp-3f;
  Floats const high = f2 * 0x1.41fbbcp-13f + (f * 0x1.5f3e54p-10f + 0x1.3b2d4cp-7f);
  Floats const power = f2 * (f2 * high + middle) + low;
  // A product, not an addition to the exponent's bits: a NaN must stay one.
  return power * floatsOf(bitsOf(rounded) << 23);
}

FLASH_INLINE float expOf(float x) { return expOf(splat(x))[0]; }

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
