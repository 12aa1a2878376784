// SPDX-License-Identifier: Apache-2.0
// A query with the scale of the scores in it, where that neither overflows nor loses digits.
#pragma once
#include "rows.h"
#include "simd.h"

namespace flash_export::cpu {
namespace {

// A scaled query, then from the next multiple of 16 on two numbers that its scores are multiplied by.
FLASH_INLINE int64_t querySize(RowProblem const& problem) { return roundUp(problem.head_dim, 16) + 16; }

FLASH_INLINE float largestOf(Floats x) {
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// Whether the largest element of a scaled query is so large or so small that the scale should not be in it: a
// product with a key would overflow, or the element has lost digits.
FLASH_INLINE Ints isFarScaled(Floats most, float scale) {
  Ints const nothing = (most == 0.0f) & splat(int32_t{-(scale > -0x1p-24f && scale < 0x1p-24f)});
  return (most > 0x1p96f) | ((most < 0x1p-64f) & (most > 0.0f)) | nothing;
}

// out[...] = query * first * second; returns the largest magnitude.
template <class Element>
FLASH_INLINE float scaleQuery(RowProblem const& problem, Row const& row, float first, float second,
                              float* out) {
  Floats most{};
  for (int d = 0; d < problem.head_dim; d += kLanes) {
    Element const* const from = static_cast<Element const*>(row.query) + d;
    int const left = problem.head_dim - d;
    Floats const q = (left >= kLanes ? load(from) : loadSome(from, left)) * first * second;
    most = larger(magnitudeOf(q), most);
    store(out + d, q);
  }
  return largestOf(most);
}

// Two powers of two whose product is 2^n, about alike: what is multiplied by one and then by the other lies
// between what it was and what it becomes.
struct TwoPowers {
  float first, second;
};
FLASH_INLINE TwoPowers powersOf(int32_t n) { return {powerOfTwo(n / 2), powerOfTwo(n - n / 2)}; }

// The query as runSlice wants it. The scale is in it; or where the largest element would become too large or
// too small by it, as much of the scale as leads to 2^100 or 2^-100, and the rest is in the two factors.
template <class Element>
FLASH_INLINE void widenQuery(RowProblem const& problem, Row const& row, float* out) {
  float* const factors = out + roundUp(problem.head_dim, 16);
  factors[0] = factors[1] = 1.0f;
  float const scale = problem.scale;
  float const scaled = scaleQuery<Element>(problem, row, scale, 1.0f, out);
  if (isFarScaled(splat(scaled), scale)[0] == 0 || scale == 0.0f) return;
  int32_t const size = exponentOf(scaleQuery<Element>(problem, row, 1.0f, 1.0f, out));
  if (size == 128) return (void)scaleQuery<Element>(problem, row, scale, 1.0f, out);  // an infinity
  int32_t const steps = exponentOf(scale), wanted = largerOf(-100, smallerOf(100, size + steps));
  TwoPowers const now = powersOf(wanted - size), later = powersOf(size + steps - wanted);
  scaleQuery<Element>(problem, row, now.first, now.second, out);
  factors[0] = scale * powerOfTwo(smallerOf(127, -steps)) * later.first;
  factors[1] = later.second;
}

}  // namespace
}  // namespace flash_export::cpu
