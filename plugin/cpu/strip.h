// SPDX-License-Identifier: Apache-2.0
// The products of the tile kernel and the softmax between them, for one strip: a few vectors of rows, one row
// a lane, against some keys. Keys and values are read in place, each element broadcast to all lanes.
#pragma once
#include "functions.h"
#include "rows.h"

namespace flash_export::cpu {
namespace {

// Vectors of the widest strip. With 32 registers two are as fast as three and waste less on a causal
// diagonal.
constexpr int kMaxVectors = kLanes == 16 ? 2 : 3;

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

// Rows of a product held in registers at once: as many accumulators as leave room for the `vectors` operands
// and the broadcast element.
constexpr int blockRows(int vectors) {
  if (kRegisters == 32) return vectors == 3 ? 8 : vectors == 2 ? 12 : 16;
  return vectors == 3 ? 4 : vectors == 2 ? 6 : 8;
}

// A strip's state; everything [..][width] has one row a lane.
struct Strip {
  Row const* rows;
  int count;        // of rows; lanes past it hold zeros and see everything
  int vectors;      // width / kLanes: 1, 2 or 3
  int first, last;  // keys that some row sees
  int full_first;   // keys that every row sees: full_first <= j < full_last
  int full_last;
  bool untouched;               // `output` holds nothing yet
  bool has_runs;                // `runs` holds something
  bool hides;                   // it was used with keys that some row does not see
  Ints alone[kMaxVectors];      // by lane: rows that this strip does not serve
  bool shared_bias;             // all rows have the same
  float* query;                 // [D][width], scaled
  float* output;                // [Dv][width], unnormalised
  float* row_max;               // [width], as baseOf has it: the largest score, or up to 1 less
  float* row_sum;               // [width]
  float* runs;                  // [runsSize()][width], of the runs of tiles before
  Ints first_key[kMaxVectors];  // by lane
  Ints last_key[kMaxVectors];
};

// A tile of keys or values as fp32 with a row stride.
struct FloatRows {
  float const* start;
  int64_t stride;
};

// Dimensions of a key that are summed on their own: one sum over all would lose a digit with every
// hundredfold.
constexpr int kBlockDims = 128;

// A block's place among those of a key.
enum class Block { kOnly, kFirst, kMiddle, kLast };

// scores[kRows keys][width] = key[kRows][D] . query[D][width], added to what is there but by the first block;
// with the last one the largest of each lane goes into row_max.
template <Block kBlock, int kRows, int kVectors>
FLASH_INLINE void scoreKeys(float const* key, int64_t stride, float const* query, int head_dim, float* scores,
                            float* row_max) {
  constexpr bool kAdds = kBlock == Block::kMiddle || kBlock == Block::kLast;
  constexpr bool kIsLast = kBlock == Block::kOnly || kBlock == Block::kLast;
  constexpr int kWidth = kVectors * kLanes;
  Floats sums[kRows][kVectors] = {};
#pragma GCC unroll 2
  for (int d = 0; d < head_dim; ++d) {
    Floats q[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) q[v] = load(query + d * kWidth + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Floats const k = splat(key[r * stride + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += k * q[v];
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    Floats most = load(row_max + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* const place = scores + r * kWidth + v * kLanes;
      Floats const sum = kAdds ? load(place) + sums[r][v] : sums[r][v];
      store(place, sum);
      if (kIsLast) most = larger(sum, most);
    }
    if (kIsLast) store(row_max + v * kLanes, most);
  }
}

// The same for any number of dimensions, block by block.
template <int kRows, int kVectors>
FLASH_INLINE void scoreManyDims(float const* key, int64_t stride, float const* query, int head_dim,
                                float* scores, float* row_max) {
  constexpr int kWidth = kVectors * kLanes;
  auto const add = [&](auto block, int d, int dims) {
    scoreKeys<Block(block.value), kRows, kVectors>(key + d, stride, query + d * int64_t{kWidth}, dims, scores,
                                                   row_max);
  };
  add(Number<int(Block::kFirst)>{}, 0, kBlockDims);
  int d = kBlockDims;
  for (; d + kBlockDims < head_dim; d += kBlockDims) add(Number<int(Block::kMiddle)>{}, d, kBlockDims);
  add(Number<int(Block::kLast)>{}, d, head_dim - d);
}

// output[kRows][width] = output * shrink + value^T[kRows][keys] . probs[keys][width]. The keys are summed on
// their own first: one sum over all tiles would lose digits with every thousand keys.
template <int kRows, int kVectors>
FLASH_INLINE void addValues(float const* value, int64_t stride, float const* probs, int keys, bool untouched,
                            float const* shrink, float* output) {
  constexpr int kWidth = kVectors * kLanes;
  Floats sums[kRows][kVectors]{};
#pragma GCC unroll 2
  for (int j = 0; j < keys; ++j) {
    Floats p[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) p[v] = load(probs + j * kWidth + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Floats const x = splat(value[j * stride + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += x * p[v];
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* const to = output + r * kWidth + v * kLanes;
      store(to, untouched ? sums[r][v] : sums[r][v] + load(to) * load(shrink + v * kLanes));
    }
  }
}

// scores[first <= j < last][width] of a tile's keys.
template <int kVectors, bool kManyDims>
FLASH_INLINE void scoreTile(Strip const& strip, FloatRows key, int head_dim, int first, int last,
                            float* scores, float* row_max) {
  constexpr int kWidth = kVectors * kLanes, kRows = blockRows(kVectors);
  auto const scoreNext = [&](auto rows, int j) {
    float const* const from = key.start + j * key.stride;
    float* const to = scores + j * kWidth;
    if constexpr (kManyDims) {
      scoreManyDims<rows.value, kVectors>(from, key.stride, strip.query, head_dim, to, row_max);
    } else {
      scoreKeys<Block::kOnly, rows.value, kVectors>(from, key.stride, strip.query, head_dim, to, row_max);
    }
  };
  int j = first;
  for (; j + kRows <= last; j += kRows) scoreNext(Number<kRows>{}, j);
  for (; j + 4 <= last; j += 4) scoreNext(Number<4>{}, j);
  for (; j < last; ++j) scoreNext(Number<1>{}, j);
}

template <int kVectors>
FLASH_INLINE void score(Strip const& strip, FloatRows key, int head_dim, int first, int last, float* scores,
                        float* row_max) {
  if (head_dim > kBlockDims) {
    scoreTile<kVectors, true>(strip, key, head_dim, first, last, scores, row_max);
  } else {
    scoreTile<kVectors, false>(strip, key, head_dim, first, last, scores, row_max);
  }
}

// Soft cap, bias and mask on the scores of keys key0 ..., and their largest again. bias: [keys][width] or
// null.
template <int kVectors>
FLASH_INLINE void adjust(Strip const& strip, float softcap, float const* bias, bool masked, int key0,
                         int first, int last, float* scores, float* row_max) {
  constexpr int kWidth = kVectors * kLanes;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    Floats most = load(row_max + v * kLanes);
    for (int j = first; j < last; ++j) {
      float* const place = scores + j * kWidth + v * kLanes;
      Floats s = load(place);
      if (softcap > 0.0f) s = softcap * tanhOf(s / softcap);
      if (bias != nullptr) {
        Floats const b = load(bias + j * kWidth + v * kLanes);
        s = b == -kInfinity ? b : s + b;  // hidden by the bias, whatever the score is
      }
      if (masked) {
        Ints const j_lanes = splat(key0 + j);
        s = ((j_lanes >= strip.first_key[v]) & (j_lanes < strip.last_key[v])) ? s : splat(-kInfinity);
      }
      most = larger(s, most);
      store(place, s);
    }
    store(row_max + v * kLanes, most);
  }
}

// Turns scores into exp(score - new row_max), updates the strip's row_max and row_sum, and writes the factor
// by which the output must shrink. `largest`: the rows' largest scores so far.
template <int kVectors>
FLASH_INLINE void exponentiate(Strip& strip, float const* largest, int keys, float* scores, float* shrink) {
  constexpr int kWidth = kVectors * kLanes;
  Floats most[kVectors], sum[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    Floats const before = load(strip.row_max + v * kLanes);
    Floats const now = baseOf(before, load(largest + v * kLanes));
    store(strip.row_max + v * kLanes, now);
    // A row that has seen no key has -inf here, and (-inf) - (-inf) is NaN.
    most[v] = now == -kInfinity ? Floats{} : now;
    store(shrink + v * kLanes, expOf(before - most[v]));
    sum[v] = Floats{};
  }
  auto const add = [&](auto count, int j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Floats part{};
#pragma GCC unroll 4
      for (int i = 0; i < count.value; ++i) {
        float* const place = scores + (j + i) * kWidth + v * kLanes;
        Floats const p = expOf(load(place) - most[v]);
        store(place, p);
        part = i == 0 ? p : part + p;
      }
      sum[v] += part;
    }
  };
  int j = 0;
  for (; j + kSummed <= keys; j += kSummed) add(Number<kSummed>{}, j);
  for (; j < keys; ++j) add(Number<1>{}, j);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    float* const place = strip.row_sum + v * kLanes;
    store(place, load(place) * load(shrink + v * kLanes) + sum[v]);
  }
}

template <int kVectors>
FLASH_INLINE void accumulate(Strip const& strip, float const* value, int64_t stride, int v_head_dim, int keys,
                             float const* probs, float const* shrink) {
  constexpr int kWidth = kVectors * kLanes, kRows = blockRows(kVectors);
  int d = 0;
  for (; d + kRows <= v_head_dim; d += kRows) {
    addValues<kRows, kVectors>(value + d, stride, probs, keys, strip.untouched, shrink,
                               strip.output + d * int64_t{kWidth});
  }
  for (; d + 4 <= v_head_dim; d += 4) {
    addValues<4, kVectors>(value + d, stride, probs, keys, strip.untouched, shrink,
                           strip.output + d * int64_t{kWidth});
  }
  for (; d < v_head_dim; ++d) {
    addValues<1, kVectors>(value + d, stride, probs, keys, strip.untouched, shrink,
                           strip.output + d * int64_t{kWidth});
  }
}

}  // namespace
}  // namespace flash_export::cpu
