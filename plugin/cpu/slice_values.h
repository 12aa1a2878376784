// SPDX-License-Identifier: Apache-2.0
// The weighted sum of a run of values for one row alone, dimensions in the vectors' lanes, in sums of sums: a
// single one would lose digits with every thousand keys.
#pragma once
#include "pages.h"
#include "rows.h"
#include "simd.h"

namespace flash_export::cpu {
namespace {

// Keys are added to a block's sum, blocks to their run's, runs to the row's output.
constexpr int kBlockKeys = 64;

// The weight of a key that a bias hides. Its value is left out: 0 times a NaN or an infinity is NaN.
constexpr float kHidden = -0.0f;

FLASH_INLINE bool isHidden(float prob) { return __builtin_signbit(prob); }

// What a run of keys has come to so far.
struct RunSums {
  float* blocks;  // [Dv] of whole blocks; holds nothing before the first is
  float* block;   // [Dv] of one that is not whole: a piece may end in it; 0 behind a whole one
  int keys;       // of the run, in both
};

int64_t runSumsSize(RowProblem const& problem) { return 2 * roundUp(problem.v_head_dim, 16); }

// Adds probs[keys] . value[keys][...] to kVectors vectors of the run's sums, of which loadLanes() reads one
// of values. With kHoles some probs may be kHidden.
template <int kVectors, bool kHoles, class Element, class LoadLanes>
FLASH_INLINE void addSlice(Element const* value, int64_t stride, float const* probs, int keys, RunSums run,
                           int d, LoadLanes const& loadLanes) {
  Floats sums[kVectors]{};
  if (run.keys % kBlockKeys != 0) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v] = load(run.block + d + v * kLanes);
  }
  value += d;
  bool first = run.keys < kBlockKeys;
  for (int j = 0, end = kBlockKeys - run.keys % kBlockKeys; j < keys; end += kBlockKeys) {
    int const last = smallerOf(end, keys);
    for (; j < last; ++j) {
      Floats const p = splat(probs[j]);
      if (!kHoles || !isHidden(probs[j])) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] += p * loadLanes(value + v * kLanes);
      }
      value += stride;
    }
    if (last < end) break;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* const blocks = run.blocks + d + v * kLanes;
      store(blocks, first ? sums[v] : load(blocks) + sums[v]);
      sums[v] = Floats{};
    }
    first = false;
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(run.block + d + v * kLanes, sums[v]);
}

// The same for all of a row's output, with `keys` values in one piece.
template <bool kHoles, class Element>
FLASH_INLINE void addPiece(RowProblem const& problem, Element const* value, int keys, float const* probs,
                           RunSums& run) {
  int64_t const stride = problem.value.row_stride;
  int const v_head_dim = problem.v_head_dim;
  auto const whole = [](Element const* from) { return load(from); };
  int d = 0;
  for (; d + 8 * kLanes <= v_head_dim; d += 8 * kLanes) {
    addSlice<8, kHoles>(value, stride, probs, keys, run, d, whole);
  }
  for (; d + 4 * kLanes <= v_head_dim; d += 4 * kLanes) {
    addSlice<4, kHoles>(value, stride, probs, keys, run, d, whole);
  }
  for (; d + kLanes <= v_head_dim; d += kLanes) {
    addSlice<1, kHoles>(value, stride, probs, keys, run, d, whole);
  }
  if (d < v_head_dim) {
    int const left = v_head_dim - d;
    addSlice<1, kHoles>(value, stride, probs, keys, run, d,
                        [left](Element const* from) { return loadSome(from, left); });
  }
  run.keys += keys;
}

// output = output * shrink + probs . the values first <= j < last, its low parts behind it. `room` has
// runSumsSize() floats.
template <bool kHoles, class Element>
FLASH_INLINE void addRun(RowProblem const& problem, int first, int last, float const* probs, float shrink,
                         float* output, float* room) {
  RunSums run{room, room + runSumsSize(problem) / 2, 0};
  for (int j = first; j < last;) {
    int const end = endOfPiece(problem.pages, j, last);
    addPiece<kHoles>(problem, rowAt<Element>(problem.pages, problem.value, j), end - j, probs + (j - first),
                     run);
    j = end;
  }
  float* const low_output = output + roundUp(problem.v_head_dim, 16);
  for (int d = 0; d < problem.v_head_dim; d += kLanes) {
    Floats const block = load(run.block + d);
    Floats const sum = run.keys < kBlockKeys ? block : load(run.blocks + d) + block;
    Floats high = load(output + d), low = load(low_output + d);
    addTo(high, low, splat(shrink), sum);
    store(output + d, high), store(low_output + d, low);
  }
}

}  // namespace
}  // namespace flash_export::cpu
