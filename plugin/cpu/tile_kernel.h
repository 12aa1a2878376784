// SPDX-License-Identifier: Apache-2.0
// Attention of many rows: the rows lie in the vectors' lanes, strip by strip, against tiles of keys.
// Online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867; tiles: Dao et al. 2022, arXiv:2205.14135.
#pragma once
#include "slice_kernel.h"
#include "strip_runs.h"

namespace flash_export::cpu {
namespace {

constexpr int kStrips = 8;  // strips of a tile, all of which use a tile of keys while it is near
constexpr int kStripRows = kMaxVectors * kLanes;  // of the widest strip
constexpr int kTileKeys = 128;

// The scratch of a tile, cut up. Sizes in floats; every part begins on 64 bytes.
struct Scratch {
  float* queries;  // [strip][D][width]
  float* outputs;  // [strip][Dv][width]
  float* row_max;  // [strip][width]
  float* row_sum;  // [strip][width]
  float* keys;     // [kTileKeys][D], where they cannot be read in place
  float* values;   // [kTileKeys][Dv]
  float* scores;   // [kTileKeys][width]
  float* bias;     // [kTileKeys][width]
  float* alone;    // of one row alone
  float* runs;     // [strip][runsSize()][width], where there are many keys
};

FLASH_INLINE int64_t cutScratch(RowProblem const& problem, float* start, Scratch& scratch) {
  int64_t used = 0;
  auto const take = [&](float*& part, int64_t floats) {
    part = start + used;
    used += roundUp(floats, 16);
  };
  take(scratch.queries, int64_t{kStrips} * kStripRows * problem.head_dim);
  take(scratch.outputs, int64_t{kStrips} * kStripRows * problem.v_head_dim);
  take(scratch.row_max, kStrips * kStripRows);
  take(scratch.row_sum, kStrips * kStripRows);
  take(scratch.keys, int64_t{kTileKeys} * problem.head_dim);
  take(scratch.values, int64_t{kTileKeys} * problem.v_head_dim);
  take(scratch.scores, kTileKeys * kStripRows);
  take(scratch.bias, kTileKeys * kStripRows);
  take(scratch.alone, combineScratch(problem));
  take(scratch.runs, int64_t{kStrips} * kStripRows * runsSize(problem.v_head_dim));
  return used;
}

// out[d][lane] = factor * rows[lane][d] for one vector of rows; rows past `count` give zeros. `out` rows are
// `width` apart.
template <class Element, class RowStart>
FLASH_INLINE void transposeRows(RowStart rowStart, int count, int dims, float factor, float* out, int width) {
  int d = 0;
  for (; d + kLanes <= dims; d += kLanes) {
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      square[i] = i < count ? load(static_cast<Element const*>(rowStart(i)) + d) * factor : Floats{};
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(out + (d + i) * int64_t{width}, square[i]);
  }
  for (; d < dims; ++d) {
    Floats column{};
    for (int i = 0; i < smallerOf(count, kLanes); ++i) {
      column[i] = loadOne(static_cast<Element const*>(rowStart(i)) + d) * factor;
    }
    store(out + d * int64_t{width}, column);
  }
}

// The keys that a strip's rows see, and their limits by lane.
FLASH_INLINE void limitKeys(Strip& strip) {
  strip.first = INT32_MAX, strip.last = 0;
  strip.full_first = 0, strip.full_last = INT32_MAX;
  strip.shared_bias = true;
  for (int v = 0; v < strip.vectors; ++v) {
    strip.first_key[v] = splat(int32_t{0}), strip.last_key[v] = splat(INT32_MAX);
  }
  for (int i = 0; i < strip.count; ++i) {
    Row const& row = strip.rows[i];
    if (row.first < row.last) {
      strip.first = smallerOf(strip.first, row.first), strip.last = largerOf(strip.last, row.last);
    }
    strip.full_first = largerOf(strip.full_first, row.first);
    strip.full_last = smallerOf(strip.full_last, row.last);
    strip.first_key[i / kLanes][i % kLanes] = row.first;
    strip.last_key[i / kLanes][i % kLanes] = row.last;
    strip.shared_bias &= row.bias == strip.rows[0].bias;
  }
}

template <class Element>
FLASH_INLINE void beginStrip(RowProblem const& problem, Strip& strip) {
  int const width = strip.vectors * kLanes;
  limitKeys(strip);
  strip.untouched = true, strip.has_runs = false, strip.hides = false;
  alignas(64) float sinks[kStripRows];
  for (int i = 0; i < width; ++i) {
    sinks[i] = i < strip.count ? strip.rows[i].sink : -kInfinity;
    strip.row_max[i] = -kInfinity, strip.row_sum[i] = 0.0f;
  }
  for (int v = 0; v < strip.vectors; ++v) {
    Row const* const rows = strip.rows + v * kLanes;
    transposeRows<Element>([rows](int i) { return rows[i].query; }, strip.count - v * kLanes,
                           problem.head_dim, problem.scale, strip.query + v * kLanes, width);
    Floats most{};
    for (int d = 0; d < problem.head_dim; ++d) {
      most = larger(magnitudeOf(load(strip.query + d * int64_t{width} + v * kLanes)), most);
    }
    strip.alone[v] = isFarScaled(most, problem.scale) | ~Ints(load(sinks + v * kLanes) < kInfinity);
  }
}

// A row is attended alone where a tile does not serve it: its scale is not to be in its query, its sink is no
// number, or its output is no finite one. Then a key that it does not see may have taken part as 0 times a
// value that is NaN or infinite, or finite values have passed what fp32 holds before the sum was divided.
template <class Element>
FLASH_INLINE void finishStrip(RowProblem const& problem, Strip& strip, Scratch const& scratch) {
  takeRuns(strip, problem.v_head_dim);
  int const width = strip.vectors * kLanes;
  alignas(64) float shares[kStripRows] = {};
  for (int i = 0; i < strip.count; ++i) {
    Row const& row = strip.rows[i];
    Joined const all = joinSink(strip.row_max[i], strip.row_sum[i], row.sink);
    shares[i] = all.share;
    if (row.lse != nullptr) *row.lse = all.row_max + __builtin_logf(all.row_sum);
  }
  for (int v = 0; v < strip.vectors; ++v) {
    Floats const sum = load(strip.row_sum + v * kLanes);
    Floats const factor = load(shares + v * kLanes);
    int const count = smallerOf(strip.count - v * kLanes, kLanes);
    Row const* const rows = strip.rows + v * kLanes;
    float const* const output = strip.output + v * kLanes;
    Floats finite{};  // 0 in the lanes whose output is, NaN in others
    int d = 0;
    for (; d + kLanes <= problem.v_head_dim; d += kLanes) {
      Floats square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = strip.untouched ? Floats{} : load(output + (d + i) * int64_t{width}) * factor;
        finite += square[i] * 0.0f;
      }
      transpose(square);
      for (int i = 0; i < count; ++i) store(static_cast<Element*>(rows[i].output) + d, square[i]);
    }
    for (; d < problem.v_head_dim; ++d) {
      Floats const column = strip.untouched ? Floats{} : load(output + d * int64_t{width}) * factor;
      finite += column * 0.0f;
      for (int i = 0; i < count; ++i) {
        storeSome(static_cast<Element*>(rows[i].output) + d, splat(float{column[i]}), 1);
      }
    }
    for (int i = 0; i < count; ++i) {
      bool const odd = finite[i] != 0.0f;
      if (strip.alone[v][i] != 0 || (odd && strip.hides)) {
        attendAlone<Element>(problem, rows[i], scratch.alone);
      } else if (odd && isFinite(sum[i])) {
        attendLightly<Element>(problem, rows[i], scratch.alone);
      }
    }
  }
}

// bias[keys][width] of a strip for the keys key0 ..., from rows that hold one number, or one a key.
template <class Element>
void gatherBias(RowProblem const& problem, Strip const& strip, int key0, int keys, float* bias) {
  int const width = strip.vectors * kLanes;
  for (int v = 0; v < strip.vectors; ++v) {
    Row const* const rows = strip.rows + v * kLanes;
    int const count = strip.count - v * kLanes;
    auto const start = [&](int i) {
      return static_cast<Element const*>(rows[i].bias) + key0 * problem.bias_stride;
    };
    float* const out = bias + v * kLanes;
    if (strip.shared_bias) {
      for (int j = 0; j < keys; ++j) {
        store(out + j * width, splat(loadOne(start(0) + j * problem.bias_stride)));
      }
    } else if (problem.bias_stride == 1) {
      transposeRows<Element>(start, count, keys, 1.0f, out, width);
    } else {
      Floats number{};
      for (int i = 0; i < smallerOf(count, kLanes); ++i) number[i] = loadOne(start(i));
      for (int j = 0; j < keys; ++j) store(out + j * width, number);
    }
  }
}

FLASH_INLINE void gatherAnyBias(RowProblem const& problem, Strip const& strip, int key0, int keys,
                                float* bias) {
  switch (problem.bias_dtype) {
    case kFlashFloat32:
      return gatherBias<float>(problem, strip, key0, keys, bias);
    case kFlashFloat16:
      return gatherBias<Half>(problem, strip, key0, keys, bias);
    default:
      return gatherBias<BFloat>(problem, strip, key0, keys, bias);
  }
}

// The keys or values first <= j < last. fp32 rows that follow one another are read in place. Others are
// copied: strides of a power of two, which [B, S, H*D] brings, put all of a tile's rows into few sets of the
// first cache (measured: 83 against 96 GFLOP/s).
template <class Element>
FLASH_INLINE FloatRows floatRows(Pages const& pages, KeyRows const& rows, int first, int last, int dims,
                                 float* room) {
  if constexpr (sizeof(Element) == sizeof(float)) {
    if (rows.row_stride == dims && endOfPiece(pages, first, last) == last) {
      return {rowAt<Element>(pages, rows, first), dims};
    }
  }
  for (int j = first; j < last; ++j) {
    Element const* const from = rowAt<Element>(pages, rows, j);
    float* const to = room + int64_t{j - first} * dims;
    int d = 0;
    for (; d + kLanes <= dims; d += kLanes) store(to + d, load(from + d));
    if (d < dims) storeSome(to + d, loadSome(from + d, dims - d), dims - d);
  }
  return {room, dims};
}

// One strip against the keys first <= j < last of a tile; `key` and `value` are those of key `first`. kDim:
// both head dims, where they are known when this is compiled; 0: they are not.
template <int kVectors, int kDim>
void stripTile(RowProblem const& problem, Strip& strip, int first, int last, FloatRows key, FloatRows value,
               Scratch const& scratch) {
  constexpr int kWidth = kVectors * kLanes;
  alignas(64) float row_max[kWidth];
  alignas(64) float shrink[kWidth];
  int const head_dim = kDim != 0 ? kDim : problem.head_dim;
  int const v_head_dim = kDim != 0 ? kDim : problem.v_head_dim;
  if constexpr (kDim != 0) key.stride = value.stride = kDim;
  int const keys = last - first;
  bool const masked = first < strip.full_first || last > strip.full_last;
  bool const biased = strip.rows[0].bias != nullptr;
  for (int v = 0; v < kVectors; ++v) store(row_max + v * kLanes, load(strip.row_max + v * kLanes));
  // The keys before `clean` are as they should be once scored; the others' raw scores count for no maximum.
  bool const all = biased || problem.softcap > 0.0f || first < strip.full_first;
  int const clean = all ? 0 : smallerOf(keys, largerOf(0, strip.full_last - first));
  score<kVectors>(strip, key, head_dim, 0, clean, scratch.scores, row_max);
  if (clean < keys) {
    alignas(64) float unused[kWidth] = {};
    score<kVectors>(strip, key, head_dim, clean, keys, scratch.scores, unused);
    if (biased) gatherAnyBias(problem, strip, first, keys, scratch.bias);
    adjust<kVectors>(strip, problem.softcap, biased ? scratch.bias : nullptr, masked, first, clean, keys,
                     scratch.scores, row_max);
  }
  exponentiate<kVectors>(strip, row_max, keys, scratch.scores, shrink);
  accumulate<kVectors>(strip, value.start, value.stride, v_head_dim, keys, scratch.scores, shrink);
  strip.untouched = false;
  strip.hides |= masked || biased;
}

// The same for any width; kDim counts for the widest.
template <int kDim>
FLASH_INLINE void anyStripTile(RowProblem const& problem, Strip& strip, int first, int last, FloatRows key,
                               FloatRows value, Scratch const& scratch) {
  if (strip.vectors == kMaxVectors) {
    stripTile<kMaxVectors, kDim>(problem, strip, first, last, key, value, scratch);
  } else if (strip.vectors == 2) {
    stripTile<2, 0>(problem, strip, first, last, key, value, scratch);
  } else {
    stripTile<1, 0>(problem, strip, first, last, key, value, scratch);
  }
}

// Cuts rows into strips, as wide as they come: a strip of one vector runs at a third of the speed of three.
FLASH_INLINE int cutStrips(Row const* rows, int count, RowProblem const& problem, Scratch const& scratch,
                           Strip* strips) {
  int used = 0;
  for (int row = 0; row < count; ++used) {
    int const left = (count - row + kLanes - 1) / kLanes;
    Strip& strip = strips[used];
    strip.vectors = left == kMaxVectors + 1 ? 2 : smallerOf(left, kMaxVectors);
    strip.rows = rows + row;
    strip.count = smallerOf(count - row, strip.vectors * kLanes);
    strip.query = scratch.queries + int64_t{row} * problem.head_dim;
    strip.output = scratch.outputs + int64_t{row} * problem.v_head_dim;
    strip.row_max = scratch.row_max + row;
    strip.row_sum = scratch.row_sum + row;
    strip.runs = scratch.runs + row * runsSize(problem.v_head_dim);
    row += strip.vectors * kLanes;
  }
  return used;
}

template <class Element>
void runTile(RowProblem const& problem, Row const* rows, int32_t count, float* room) {
  Scratch scratch;
  cutScratch(problem, room, scratch);
  Strip strips[kStrips];
  int const used = cutStrips(rows, count, problem, scratch, strips);
  int first = INT32_MAX, last = 0;
  for (int t = 0; t < used; ++t) {
    beginStrip<Element>(problem, strips[t]);
    first = smallerOf(first, strips[t].first), last = largerOf(last, strips[t].last);
  }
  for (int key0 = first; key0 < last; key0 += kTileKeys) {
    int const end = smallerOf(key0 + kTileKeys, last);
    FloatRows const k =
        floatRows<Element>(problem.pages, problem.key, key0, end, problem.head_dim, scratch.keys);
    FloatRows const v =
        floatRows<Element>(problem.pages, problem.value, key0, end, problem.v_head_dim, scratch.values);
    for (int t = 0; t < used; ++t) {
      Strip& strip = strips[t];
      int const from = largerOf(key0, strip.first), to = smallerOf(end, strip.last);
      if (from >= to) continue;
      FloatRows const ks{k.start + (from - key0) * k.stride, k.stride};
      FloatRows const vs{v.start + (from - key0) * v.stride, v.stride};
      if (problem.head_dim == 64 && problem.v_head_dim == 64) {
        anyStripTile<64>(problem, strip, from, to, ks, vs, scratch);
      } else if (problem.head_dim == 128 && problem.v_head_dim == 128) {
        anyStripTile<128>(problem, strip, from, to, ks, vs, scratch);
      } else {
        anyStripTile<0>(problem, strip, from, to, ks, vs, scratch);
      }
    }
    if ((end - first) % (kRunTiles * kTileKeys) != 0 || end == last) continue;
    for (int t = 0; t < used; ++t) joinRun(strips[t], problem.v_head_dim);
  }
  for (int t = 0; t < used; ++t) finishStrip<Element>(problem, strips[t], scratch);
}

void tile(RowProblem const& problem, Row const* rows, int32_t count, float* scratch) {
  switch (problem.dtype) {
    case kFlashFloat32:
      return runTile<float>(problem, rows, count, scratch);
    case kFlashFloat16:
      return runTile<Half>(problem, rows, count, scratch);
    default:
      return runTile<BFloat>(problem, rows, count, scratch);
  }
}

int64_t tileScratch(RowProblem const& problem) {
  Scratch scratch;
  return cutScratch(problem, nullptr, scratch);
}

}  // namespace
}  // namespace flash_export::cpu
