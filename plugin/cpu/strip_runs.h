// SPDX-License-Identifier: Apache-2.0
// A strip's sums over very many keys. A run of tiles is summed in the strip itself; runs are added up in sums
// of two parts, whose error does not grow with their number. Fewer keys than a run pay nothing.
#pragma once
#include "strip.h"

namespace flash_export::cpu {
namespace {

constexpr int kRunTiles = 64;

// Floats a row of what all runs but the last have come to: [row_max, row_sum, its low part, output[Dv], its
// low parts[Dv]][width].
FLASH_INLINE int64_t runsSize(int v_head_dim) { return 3 + 2 * int64_t{v_head_dim}; }

// Adds the strip's sums to those of the runs before, and begins a run.
FLASH_INLINE void joinRun(Strip& strip, int v_head_dim) {
  if (strip.untouched) return;
  int64_t const width = strip.vectors * kLanes;
  for (int64_t lane = 0; lane < width; lane += kLanes) {
    float* const runs = strip.runs + lane;
    Floats const now = load(strip.row_max + lane), most = now == -kInfinity ? Floats{} : now;
    Floats const shrink = strip.has_runs ? expOf(load(runs) - most) : Floats{};
    store(runs, now);
    auto const add = [&](float* high, float* low, float const* run) {
      Floats h = strip.has_runs ? load(high) : Floats{}, l = strip.has_runs ? load(low) : Floats{};
      addTo(h, l, shrink, load(run));
      store(high, h), store(low, l);
    };
    add(runs + width, runs + 2 * width, strip.row_sum + lane);
    store(strip.row_sum + lane, Floats{});
    float* const output = runs + 3 * width;
    for (int64_t d = 0; d < v_head_dim; ++d) {
      add(output + d * width, output + (v_head_dim + d) * width, strip.output + lane + d * width);
    }
  }
  strip.untouched = strip.has_runs = true;
}

// Puts what all runs have come to where the strip's own sums are.
FLASH_INLINE void takeRuns(Strip& strip, int v_head_dim) {
  if (!strip.has_runs) return;
  joinRun(strip, v_head_dim);
  int64_t const width = strip.vectors * kLanes;
  for (int64_t lane = 0; lane < width; lane += kLanes) {
    float const* const runs = strip.runs + lane;
    float const* const output = runs + 3 * width;
    store(strip.row_sum + lane, wholeOf(load(runs + width), load(runs + 2 * width)));
    for (int64_t d = 0; d < v_head_dim; ++d) {
      store(strip.output + lane + d * width,
            wholeOf(load(output + d * width), load(output + (v_head_dim + d) * width)));
    }
  }
  strip.untouched = false;
}

}  // namespace
}  // namespace flash_export::cpu
