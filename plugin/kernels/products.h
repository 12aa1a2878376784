// SPDX-License-Identifier: Apache-2.0
// The two matrix products of attention on tiles in shared memory, with results in the mma fragment layout: a
// lane's element j of fragment [m][n] is row m*16 + fragmentRow(lane, j) of its warp, column n*8 +
// fragmentColumn(lane, j).
//   MmaProducts     16-bit elements: tensor cores, fp32 accumulators
//   ScalarProducts  fp32: multiply-adds, every product exact to fp32 rounding (TF32 would lose 13 bits)
// Both: scores(s, query, key)           s += Q [tile_q, D] . K [tile_kv, D]^T
//       accumulate(o, weights, value)   o += weights [tile_q, tile_kv] . V [tile_kv, D]
//       stage(tile, row, fragment, ...) two neighbours of an output row into a tile
#pragma once
#include "device_ops.h"
#include "geometry.h"

namespace flash_export::kernels {

template <class Element, class Shape>
struct MmaProducts {
  using Scores = float[Shape::kFragmentsQ][Shape::kFragmentsKv][4];
  using Output = float[Shape::kFragmentsQ][Shape::kFragmentsOut][4];

  static FLASH_DEVICE void scores(Scores& s, uint32_t query, uint32_t key) {
    int const lane = ops::lane();
    // A: rows 0-15, two chunks of the head dim. B: keys 0-15, the same two chunks.
    uint32_t const a_address =
        query + swizzled(ops::warp() * Shape::kRowsPerWarp + (lane & 15), lane >> 4, Shape::kChunks);
    uint32_t const b_address =
        key + swizzled((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1, Shape::kChunks);
    FLASH_UNROLL
    for (int k = 0; k < Shape::kHeadDim / 16; ++k) {
      uint32_t a[Shape::kFragmentsQ][4];
      FLASH_UNROLL
      for (int m = 0; m < Shape::kFragmentsQ; ++m) {
        ops::ldmatrix(a[m], (a_address ^ (k * 2 * kChunkBytes)) + m * 16 * Shape::kRowBytes);
      }
      FLASH_UNROLL
      for (int n = 0; n < Shape::kFragmentsKv; n += 2) {
        uint32_t b[4];
        ops::ldmatrix(b, (b_address ^ (k * 2 * kChunkBytes)) + n * 8 * Shape::kRowBytes);
        FLASH_UNROLL
        for (int m = 0; m < Shape::kFragmentsQ; ++m) {
          ops::mma<Element>(s[m][n], a[m], b[0], b[1]);
          ops::mma<Element>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  static FLASH_DEVICE void accumulate(Output& o, Scores const& weights, uint32_t value) {
    int const lane = ops::lane();
    uint32_t const b_address = value + swizzled(lane & 15, lane >> 4, Shape::kChunks);
    FLASH_UNROLL
    for (int k = 0; k < Shape::kTileKv / 16; ++k) {
      // Two accumulator fragments of the scores are, rounded, one A fragment: no exchange between lanes.
      uint32_t a[Shape::kFragmentsQ][4];
      FLASH_UNROLL
      for (int m = 0; m < Shape::kFragmentsQ; ++m) {
        FLASH_UNROLL
        for (int i = 0; i < 4; ++i) {
          float const* const pair = &weights[m][2 * k + i / 2][i % 2 * 2];
          a[m][i] = ops::packPair<Element>(pair[0], pair[1]);
        }
      }
      FLASH_UNROLL
      for (int n = 0; n < Shape::kFragmentsOut; n += 2) {
        uint32_t b[4];
        ops::ldmatrixTransposed(b, (b_address ^ (n * kChunkBytes)) + k * 16 * Shape::kRowBytes);
        FLASH_UNROLL
        for (int m = 0; m < Shape::kFragmentsQ; ++m) {
          ops::mma<Element>(o[m][n], a[m], b[0], b[1]);
          ops::mma<Element>(o[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  static FLASH_DEVICE void stage(uint32_t tile, int row, int fragment, float first, float second) {
    ops::storeShared32(tile + swizzled(row, fragment, Shape::kChunks) + (ops::lane() & 3) * 4,
                       ops::packPair<Element>(first, second));
  }
};

template <class Shape>
struct ScalarProducts {
  using Scores = float[Shape::kFragmentsQ][Shape::kFragmentsKv][4];
  using Output = float[Shape::kFragmentsQ][Shape::kFragmentsOut][4];

  // Eight elements of a row: two chunks.
  struct Eight {
    ops::Words4 low, high;
  };

  static FLASH_DEVICE Eight loadEight(uint32_t tile, int row, int chunk) {
    return {ops::loadShared128(tile + swizzled(row, chunk, Shape::kChunks)),
            ops::loadShared128(tile + swizzled(row, chunk + 1, Shape::kChunks))};
  }

  // Summed on its own and then added to a score: an eighth of the roundings at the size of the whole sum.
  static FLASH_DEVICE float dot(Eight const& a, Eight const& b) {
    float sum = ops::floatOf(a.low.w[0]) * ops::floatOf(b.low.w[0]);
    FLASH_UNROLL
    for (int i = 1; i < 4; ++i)
      sum = ops::multiplyAdd(ops::floatOf(a.low.w[i]), ops::floatOf(b.low.w[i]), sum);
    FLASH_UNROLL
    for (int i = 0; i < 4; ++i)
      sum = ops::multiplyAdd(ops::floatOf(a.high.w[i]), ops::floatOf(b.high.w[i]), sum);
    return sum;
  }

  static FLASH_DEVICE void scores(Scores& s, uint32_t query, uint32_t key) {
    int const row0 = ops::warp() * Shape::kRowsPerWarp + (ops::lane() >> 2);
    int const key0 = (ops::lane() & 3) * 2;
    FLASH_NO_UNROLL
    for (int chunk = 0; chunk < Shape::kChunks; chunk += 2) {
      FLASH_UNROLL
      for (int m = 0; m < Shape::kFragmentsQ; ++m) {
        Eight const q0 = loadEight(query, row0 + m * 16, chunk);
        Eight const q1 = loadEight(query, row0 + m * 16 + 8, chunk);
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          FLASH_UNROLL
          for (int e = 0; e < 2; ++e) {
            Eight const k = loadEight(key, key0 + n * 8 + e, chunk);
            s[m][n][e] += dot(q0, k);
            s[m][n][2 + e] += dot(q1, k);
          }
        }
      }
    }
  }

  // Summed over the tile's keys on their own and then added to the output: as many roundings at the size of
  // the whole sum as there are tiles, not keys. A few columns at a time, for the registers.
  static FLASH_DEVICE void accumulate(Output& o, Scores const& weights, uint32_t value) {
    FLASH_UNROLL
    for (int first = 0; first < Shape::kFragmentsOut; first += kGroup) {
      Group sums;
      FLASH_UNROLL
      for (int m = 0; m < Shape::kFragmentsQ; ++m) {
        FLASH_UNROLL
        for (int i = 0; i < kGroup * 4; ++i) sums[m][i / 4][i % 4] = 0.0f;
      }
      FLASH_NO_UNROLL
      for (int owner = 0; owner < 4; ++owner) addKeysOf(owner, sums, first, weights, value);
      FLASH_UNROLL
      for (int m = 0; m < Shape::kFragmentsQ; ++m) {
        FLASH_UNROLL
        for (int i = 0; i < kGroup * 4; ++i) o[m][first + i / 4][i % 4] += sums[m][i / 4][i % 4];
      }
    }
  }

  static FLASH_DEVICE void stage(uint32_t tile, int row, int fragment, float first, float second) {
    ops::storeShared64(pairAddress(tile, row, fragment), {{ops::bitsOf(first), ops::bitsOf(second)}});
  }

 private:
  // A fragment of 8 columns is two chunks of fp32; a lane's two columns are half a chunk.
  static FLASH_DEVICE uint32_t pairAddress(uint32_t tile, int row, int fragment) {
    int const pair = ops::lane() & 3;
    return tile + swizzled(row, fragment * 2 + (pair >> 1), Shape::kChunks) + (pair & 1) * 8;
  }

  static constexpr int kGroup = 4;
  using Group = float[Shape::kFragmentsQ][kGroup][4];

  // The keys n*8 + owner*2 + {0, 1}, which this lane of each quad holds.
  static FLASH_DEVICE void addKeysOf(int owner, Group& sums, int first, Scores const& weights,
                                     uint32_t value) {
    int const holder = (ops::lane() & ~3) | owner;
    FLASH_UNROLL
    for (int n = 0; n < Shape::kFragmentsKv; ++n) {
      FLASH_UNROLL
      for (int e = 0; e < 2; ++e) {
        float weight[Shape::kFragmentsQ][2];
        FLASH_UNROLL
        for (int m = 0; m < Shape::kFragmentsQ; ++m) {
          weight[m][0] = ops::shuffle(weights[m][n][e], holder);
          weight[m][1] = ops::shuffle(weights[m][n][2 + e], holder);
        }
        addRow(sums, weight, pairAddress(value, n * 8 + owner * 2 + e, 0), first);
      }
    }
  }

  static FLASH_DEVICE void addRow(Group& sums, float const (&weight)[Shape::kFragmentsQ][2], uint32_t row,
                                  int first) {
    FLASH_UNROLL
    for (int n = 0; n < kGroup; ++n) {
      ops::Words2 const v = ops::loadShared64(row ^ ((first + n) * 2 * kChunkBytes));
      FLASH_UNROLL
      for (int m = 0; m < Shape::kFragmentsQ; ++m) {
        FLASH_UNROLL
        for (int j = 0; j < 4; ++j) {
          sums[m][n][j] = ops::multiplyAdd(weight[m][j >> 1], ops::floatOf(v.w[j & 1]), sums[m][n][j]);
        }
      }
    }
  }
};

}  // namespace flash_export::kernels
