// SPDX-License-Identifier: Apache-2.0
// The softmax of one query row, fed one tile of scores at a time.
// Online normaliser calculation: Milakov & Gimelshein 2018, arXiv:1805.02867, Alg. 3.
//
// Three policies, one interface: weight(score, offset(row_max)) = e^(score - row_max) in their own score
// units (of a row that is steep(row_max), weight(score - row_max, offset)), and shrink(old, new) is what a
// sum of weights against `old` becomes against `new`, exactly 1 where they are equal (a weight() of the old
// maximum would be off by a rounding, and drift over thousands of tiles).
//   FoldedSoftmax   scores are Q.K as the tensor cores leave it; scale and log2 e are folded into one
//   multiply-add
//                   an exponent. Needs scale > 0 and nothing added to the scores. Where the product of
//                   maximum and scale is so large that its rounding would show, a row is steep: its maximum
//                   is subtracted first.
//   NaturalSoftmax  scores are scale * Q.K with softcap and bias: natural units. The maximum is subtracted
//   before
//                   the product with log2 e, so a row filled with finfo.min does not overflow.
//   PreciseSoftmax  natural units, exp correct to about 1 ulp: for fp32, where ex2.approx's 2 ulp would show.
#pragma once
#include "device_ops.h"
#include "forward_params.h"

namespace flash_export::kernels {

constexpr float kNegativeInfinity = -__builtin_huge_valf();

// e^x for x <= 88; 0 below -87, where it would be subnormal. Cody-Waite reduction by n ln 2, Taylor to degree
// 7 on |r| <= ln 2 / 2 (truncation 5e-9, under a tenth of an ulp).
FLASH_DEVICE float expPrecise(float x) {
  constexpr float kLn2High = 0.693359375f;  // 10 bits: n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  float const shifted = ops::multiplyAdd(x, kLog2E, kRound);
  float const n = shifted - kRound;
  float const r = ops::multiplyAdd(n, -kLn2Low, ops::multiplyAdd(n, -kLn2High, x));
  float y = 1.0f / 5040.0f;
  y = ops::multiplyAdd(y, r, 1.0f / 720.0f);
  y = ops::multiplyAdd(y, r, 1.0f / 120.0f);
  y = ops::multiplyAdd(y, r, 1.0f / 24.0f);
  y = ops::multiplyAdd(y, r, 1.0f / 6.0f);
  y = ops::multiplyAdd(y, r, 0.5f);
  y = ops::multiplyAdd(y, r, 1.0f);
  y = ops::multiplyAdd(y, r, 1.0f);
  float const power = ops::floatOf((ops::bitsOf(shifted) - ops::bitsOf(kRound) + 127u) << 23);
  // Only a number is cut off: NaN compares false and goes through.
  return x < -87.0f ? 0.0f : y * power;
}

// -inf - (-inf) is NaN: while a row has seen no key, weights are taken against 0 instead.
FLASH_DEVICE float finiteMaximum(float row_max) { return row_max == kNegativeInfinity ? 0.0f : row_max; }

FLASH_DEVICE float expApprox(float x) { return ops::exp2Approx(x * kLog2E); }

struct FoldedSoftmax {
  static constexpr bool kRawScores = true;
  // Of |maximum * scale * log2 e|: the product's rounding moves the row's weights by up to 2^-24 of this in
  // log2 units. At 2^16 that is less than an output's own rounding; past 2^28 weights would overflow fp16.
  static constexpr float kSteep = 65536.0f;
  float scale, scale_log2, growth;
  FLASH_DEVICE explicit FoldedSoftmax(ForwardParams const& p)
      : scale(p.scale), scale_log2(p.scale_log2), growth(p.lazy_growth) {}
  FLASH_DEVICE bool steep(float row_max) const {
    float const product = finiteMaximum(row_max) * scale_log2;
    return product > kSteep || product < -kSteep;
  }
  FLASH_DEVICE float limit(float row_max) const {
    return steep(row_max) ? kNegativeInfinity : row_max + growth;
  }
  FLASH_DEVICE float offset(float row_max) const { return steep(row_max) ? 0.0f : row_max * scale_log2; }
  FLASH_DEVICE float weight(float score, float offset) const {
    return ops::exp2Approx(ops::multiplyAdd(score, scale_log2, -offset));
  }
  FLASH_DEVICE float shrink(float old_max, float new_max) const {
    return ops::exp2Approx((old_max - new_max) * scale_log2);
  }
  FLASH_DEVICE float natural(float row_max) const { return row_max * scale; }
  static FLASH_DEVICE float exp(float x) { return expApprox(x); }
};

struct NaturalSoftmax {
  static constexpr bool kRawScores = false;
  FLASH_DEVICE explicit NaturalSoftmax(ForwardParams const&) {}
  FLASH_DEVICE bool steep(float) const { return false; }
  FLASH_DEVICE float limit(float row_max) const { return row_max + kLazyGrowth * kLn2; }
  FLASH_DEVICE float offset(float row_max) const { return row_max; }
  FLASH_DEVICE float weight(float score, float offset) const { return exp(score - offset); }
  FLASH_DEVICE float shrink(float old_max, float new_max) const { return exp(old_max - new_max); }
  FLASH_DEVICE float natural(float row_max) const { return row_max; }
  static FLASH_DEVICE float exp(float x) { return expApprox(x); }
};

struct PreciseSoftmax : NaturalSoftmax {
  using NaturalSoftmax::NaturalSoftmax;
  FLASH_DEVICE float weight(float score, float offset) const { return exp(score - offset); }
  FLASH_DEVICE float shrink(float old_max, float new_max) const { return exp(old_max - new_max); }
  static FLASH_DEVICE float exp(float x) { return expPrecise(x); }
};

// A row so far. Its weights are taken against `maximum`, which is of an earlier tile until a score passes
// `limit`: most tiles then leave sum and output as they are. Every score passes the limit of a steep row.
// What each row does is its own matter, so its bits are too.
struct RowState {
  float maximum;  // kNegativeInfinity: no key was seen yet
  float limit;    // the policy's, of `maximum`
  float offset;   // likewise
  float sum;

  FLASH_DEVICE void clear() { *this = {kNegativeInfinity, kNegativeInfinity, 0.0f, 0.0f}; }

  // Takes the weights of all later scores against `tile_maximum` if it is past the limit and larger than the
  // maximum (of a steep row the limit says nothing). Returns what the output so far must be multiplied by; 1
  // where nothing moved.
  template <class Softmax>
  FLASH_DEVICE float raise(Softmax const& policy, float tile_maximum) {
    if (!(tile_maximum > limit && tile_maximum > maximum)) return 1.0f;
    float const shrink = policy.shrink(maximum, tile_maximum);
    *this = {tile_maximum, policy.limit(tile_maximum), policy.offset(tile_maximum), sum * shrink};
    return shrink;
  }
};

// What the row's accumulated output is multiplied by, and its log-sum-exp (natural log, the sink included).
struct RowEnd {
  float multiplier, lse;
};

// `natural_max` and `row_sum` are of the whole row; `sink` joins the sum without a value (-inf: none; NaN
// shows). A row that saw no key gives 0 and the sink, whatever that is.
template <class Softmax>
FLASH_DEVICE RowEnd endRow(float natural_max, float row_sum, float sink) {
  if (row_sum == 0.0f) return {0.0f, sink};
  float shrink = 1.0f;
  if (sink != kNegativeInfinity) {
    float const with_sink = ops::maximum(natural_max, sink);
    shrink = Softmax::exp(natural_max - with_sink);
    float const weight = sink == with_sink ? 1.0f : Softmax::exp(sink - with_sink);  // +inf has all of it
    row_sum = ops::multiplyAdd(row_sum, shrink, weight);
    natural_max = with_sink;
  }
  return {ops::roundedDivide(shrink, row_sum), natural_max + ops::log2Approx(row_sum) * kLn2};
}

}  // namespace flash_export::kernels
