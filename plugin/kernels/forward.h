// SPDX-License-Identifier: Apache-2.0
// The forward pass of one tile of query rows, one thread block each.
// FlashAttention-2: Dao 2023, arXiv:2307.08691, Alg. 1, with the keys from last to first.
//
// Warps split the query rows, so scores, weights and output stay in registers and a warp needs the others
// only for copying. The copy of V(n) runs under the scores of tile n, that of K(n-1) under its output:
//
//   wait K(n) | barrier | start V(n) | S = Q.K(n)^T | softmax | wait V(n) | barrier | start K(n-1) | O +=
//   P.V(n)
//
// A key that band or bias hides inside a visited tile takes part as 0 * V: a NaN or infinity in its V row
// shows, as in the unfused formula. Keys past kv_length are never read.
#pragma once
#include <type_traits>

#include "forward_params.h"
#include "products.h"
#include "softmax.h"
#include "tile_io.h"

namespace flash_export::kernels {

// What a compiled kernel can do. Plain: 16-byte copies, scale > 0, no softcap, no bias. General: everything.
enum class Features { kPlain, kGeneral };

template <class Element_, int kHeadDim, int kTileQ, int kTileKv, int kWarps, Features kFeatures>
struct Forward {
  using Element = Element_;
  using Shape = TileShape<int(sizeof(Element)), kHeadDim, kTileQ, kTileKv, kWarps>;
  static constexpr bool kIsFloat = sizeof(Element) == 4;
  static constexpr bool kPlain = kFeatures == Features::kPlain;
  static_assert(!(kIsFloat && kPlain), "fp32 keeps its scores in natural units");
  using Products = std::conditional_t<kIsFloat, ScalarProducts<Shape>, MmaProducts<Element, Shape>>;
  using Softmax =
      std::conditional_t<kIsFloat, PreciseSoftmax, std::conditional_t<kPlain, FoldedSoftmax, NaturalSoftmax>>;
  static constexpr int kFragmentsQ = Shape::kFragmentsQ;

  // One block's share: rows row0 ... row_end - 1 of one head of one batch.
  struct Work {
    int batch, head, row0, row_end;
    Band band;
    Element const *query, *key, *value;  // [S, D] of this head by row_stride
  };

  struct State {
    typename Products::Output out;
    float row_max[kFragmentsQ][2],
        row_sum[kFragmentsQ][2];  // of this lane's columns until finish() joins a quad
  };

  static FLASH_DEVICE void run(ForwardParams const& p) {
    Work const work = locate(p);
    KeyTiles const tiles = keyTiles(work.band, work.row0, work.row_end, kTileKv);
    uint32_t const shared = ops::sharedBase();
    State state;
    clear(state);
    if (tiles.begin < tiles.end) {
      loadTile<Shape, kTileQ, kPlain>(shared + Shape::kQueryOffset, work.query, p.query.row_stride, work.row0,
                                      work.row_end, p.head_dim, p.vector_copies, false);
      loadKeys(p, work, tiles.end - 1, false);
      visit(p, work, state, tiles);
    }
    finish(p, work, state);
  }

 private:
  // Tiles of rows are the grid's fastest axis, last first: with a causal mask those are the longest, and
  // short work at the end fills the device better. Heads that share keys follow each other.
  static FLASH_DEVICE Work locate(ForwardParams const& p) {
    int const row_tiles = int(ceilDiv(p.seqlen_q, kTileQ));
    int64_t const block = ops::blockIndex();
    int64_t const batch_head = block / row_tiles;
    Work w;
    w.row0 = (row_tiles - 1 - int(block - batch_head * row_tiles)) * kTileQ;
    w.row_end = smaller(w.row0 + kTileQ, p.seqlen_q);
    w.batch = int(batch_head / p.q_heads);
    w.head = int(batch_head - int64_t(w.batch) * p.q_heads);
    int kv_length = p.seqlen_kv;
    if (p.kv_lengths != nullptr) {
      int const given = ops::loadGlobal(p.kv_lengths + int64_t(w.batch) * p.kv_lengths_stride);
      kv_length = larger(0, smaller(given, kv_length));
    }
    w.band = makeBand(p.causal, p.diagonal, p.window_left, p.window_right, p.seqlen_q, kv_length);
    int const kv_head = w.head / p.group;
    w.query = headOf(p.query, w.batch, w.head);
    w.key = headOf(p.key, w.batch, kv_head);
    w.value = headOf(p.value, w.batch, kv_head);
    return w;
  }

  static FLASH_DEVICE Element* headOf(FlashTensor const& tensor, int batch, int head) {
    return static_cast<Element*>(tensor.data) + int64_t(batch) * tensor.batch_stride +
           int64_t(head) * tensor.head_stride;
  }

  // Masked tiles lie at either end. Plain kernels have a loop without a mask for those between; in the others
  // the mask is a small part, and a second copy of their loop would spill.
  static FLASH_DEVICE void visit(ForwardParams const& p, Work const& work, State& state,
                                 KeyTiles const& tiles) {
    int tile = tiles.end - 1;
    if constexpr (kPlain) {
      FLASH_NO_UNROLL
      while (tile >= tiles.begin) {
        FLASH_NO_UNROLL
        for (; tile >= tiles.begin && tiles.needsMask(tile); --tile) step(p, work, state, tiles, tile, true);
        FLASH_NO_UNROLL
        for (; tile >= tiles.full_begin; --tile) step(p, work, state, tiles, tile, false);
      }
    } else {
      FLASH_NO_UNROLL
      for (; tile >= tiles.begin; --tile) step(p, work, state, tiles, tile, tiles.needsMask(tile));
    }
  }

  template <int kRows, int kColumns, class Act>
  static FLASH_DEVICE void forEach(float (&fragments)[kRows][kColumns][4], Act act) {
    FLASH_UNROLL
    for (int m = 0; m < kRows; ++m) {
      FLASH_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        FLASH_UNROLL
        for (int j = 0; j < 4; ++j) act(fragments[m][n][j]);
      }
    }
  }

  static FLASH_DEVICE void clear(State& state) {
    forEach(state.out, [](float& x) { x = 0.0f; });
    FLASH_UNROLL
    for (int m = 0; m < kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        state.row_max[m][h] = kNegativeInfinity;
        state.row_sum[m][h] = 0.0f;
      }
    }
  }

  static FLASH_DEVICE void loadKeys(ForwardParams const& p, Work const& work, int tile, bool all_there) {
    loadTile<Shape, kTileKv, kPlain>(ops::sharedBase() + Shape::kKeyOffset, work.key, p.key.row_stride,
                                     tile * kTileKv, work.band.kv_length, p.head_dim, p.vector_copies,
                                     all_there);
    ops::copyAsyncCommit();
  }

  static FLASH_DEVICE void loadValues(ForwardParams const& p, Work const& work, int tile, bool all_there) {
    loadTile<Shape, kTileKv, kPlain>(ops::sharedBase() + Shape::kValueOffset, work.value, p.value.row_stride,
                                     tile * kTileKv, work.band.kv_length, p.v_head_dim, p.vector_copies,
                                     all_there);
    ops::copyAsyncCommit();
  }

  static FLASH_DEVICE void step(ForwardParams const& p, Work const& work, State& state, KeyTiles const& tiles,
                                int tile, bool masked) {
    uint32_t const shared = ops::sharedBase();
    ops::copyAsyncWait<0>();
    ops::syncThreads();  // K(n) is there for all; all are done with V(n+1)
    loadValues(p, work, tile, !masked);
    typename Products::Scores s;
    forEach(s, [](float& score) { score = 0.0f; });
    Products::scores(s, shared + Shape::kQueryOffset, shared + Shape::kKeyOffset);
    if (!Softmax::kRawScores) addScoreTerms(p, work, s, tile * kTileKv);
    if (masked) mask(work, s, tile * kTileKv);
    softmax(Softmax(p), state, s);
    ops::copyAsyncWait<0>();
    ops::syncThreads();  // V(n) is there for all; all are done with K(n)
    if (tile > tiles.begin) loadKeys(p, work, tile - 1, true);  // only the last tile may lack keys
    Products::accumulate(state.out, s, shared + Shape::kValueOffset);
  }

  static FLASH_DEVICE int rowOf(Work const& work, int fragment, int half) {
    return work.row0 + ops::warp() * Shape::kRowsPerWarp + fragment * 16 + fragmentRow(ops::lane(), half * 2);
  }

  // Scores become natural: softcap(scale * Q.K) + bias, scale and bias with one rounding.
  static FLASH_DEVICE void addScoreTerms(ForwardParams const& p, Work const& work,
                                         typename Products::Scores& s, int key0) {
    float factor = p.scale;  // what the scores have yet to be multiplied by
    if (p.softcap > 0.0f) {
      forEach(s, [&p](float& score) {
        score = p.softcap * ops::tanhPrecise(ops::roundedDivide(score * p.scale, p.softcap));
      });
      factor = 1.0f;
    }
    if (p.bias == nullptr) {
      forEach(s, [factor](float& score) { score *= factor; });
    } else if (p.bias_is_float) {
      addBias<float>(p, work, s, key0, factor);
    } else {
      addBias<Element>(p, work, s, key0, factor);
    }
  }

  // The bias of rows and keys that exist; the others are masked or never stored.
  template <class BiasElement>
  static FLASH_DEVICE void addBias(ForwardParams const& p, Work const& work, typename Products::Scores& s,
                                   int key0, float factor) {
    BiasElement const* const head = static_cast<BiasElement const*>(p.bias) +
                                    int64_t(work.batch) * p.bias_stride[0] +
                                    int64_t(work.head) * p.bias_stride[1];
    int const first_key = key0 + fragmentColumn(ops::lane(), 0);
    FLASH_UNROLL
    for (int m = 0; m < kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        int const row = rowOf(work, m, h);
        BiasElement const* const first =
            head + int64_t(row) * p.bias_stride[2] + int64_t(first_key) * p.bias_stride[3];
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          FLASH_UNROLL
          for (int e = 0; e < 2; ++e) {
            bool const there = row < work.row_end && first_key + n * 8 + e < work.band.kv_length;
            float& score = s[m][n][h * 2 + e];
            if (there) {
              score = ops::multiplyAdd(score, factor,
                                       ops::loadFloat(first + int64_t(n * 8 + e) * p.bias_stride[3]));
            }
          }
        }
      }
    }
  }

  static FLASH_DEVICE void mask(Work const& work, typename Products::Scores& s, int key0) {
    FLASH_UNROLL
    for (int m = 0; m < kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int j = 0; j < 4; ++j) {
        KeySpan const visible = visibleKeys(work.band, rowOf(work, m, j >> 1), key0);
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          int const column = n * 8 + fragmentColumn(ops::lane(), j);
          if (column < visible.first || column >= visible.last) s[m][n][j] = kNegativeInfinity;
        }
      }
    }
  }

  // Scores become weights; the state moves to the new maximum.
  static FLASH_DEVICE void softmax(Softmax const& policy, State& state, typename Products::Scores& s) {
    FLASH_UNROLL
    for (int m = 0; m < kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        float new_max = state.row_max[m][h];
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          new_max = ops::maximum(new_max, ops::maximum(s[m][n][h * 2], s[m][n][h * 2 + 1]));
        }
        // The four lanes of a quad hold one row.
        new_max = ops::maximum(new_max, ops::shuffleXor(new_max, 1));
        new_max = ops::maximum(new_max, ops::shuffleXor(new_max, 2));
        float const against = finiteMaximum(new_max);
        float const shrink = policy.shrink(state.row_max[m][h], against);
        float const offset = policy.offset(against);
        float sum = state.row_sum[m][h] * shrink;
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          FLASH_UNROLL
          for (int e = 0; e < 2; ++e) {
            float const weight = policy.weight(s[m][n][h * 2 + e], offset);
            s[m][n][h * 2 + e] = weight;
            sum += weight;
          }
        }
        state.row_max[m][h] = new_max;
        state.row_sum[m][h] = sum;
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsOut; ++n) {
          state.out[m][n][h * 2] *= shrink;
          state.out[m][n][h * 2 + 1] *= shrink;
        }
      }
    }
  }

  // Divides by the row sums, stages the warp's rows in Q's place and writes them; writes the lse. The last
  // barrier of step() lies behind every read of Q.
  static FLASH_DEVICE void finish(ForwardParams const& p, Work const& work, State const& state) {
    Softmax const policy(p);
    uint32_t const staged = ops::sharedBase() + Shape::kQueryOffset;
    float const sink = p.sinks == nullptr ? kNegativeInfinity
                                          : ops::loadGlobal(p.sinks + int64_t(work.head) * p.sinks_stride);
    FLASH_UNROLL
    for (int m = 0; m < kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        float sum = state.row_sum[m][h];
        sum += ops::shuffleXor(sum, 1);
        sum += ops::shuffleXor(sum, 2);
        RowEnd const end = endRow<Softmax>(policy.natural(state.row_max[m][h]), sum, sink);
        int const row = rowOf(work, m, h);
        if (p.lse != nullptr && row < work.row_end && (ops::lane() & 3) == 0) {
          ops::storeBits(p.lse + (int64_t(work.batch) * p.q_heads + work.head) * p.seqlen_q + row,
                         ops::bitsOf(end.lse));
        }
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsOut; ++n) {
          Products::stage(staged, row - work.row0, n, state.out[m][n][h * 2] * end.multiplier,
                          state.out[m][n][h * 2 + 1] * end.multiplier);
        }
      }
    }
    ops::syncWarp();  // the warp's rows are staged
    storeRows<Shape, Shape::kRowsPerWarp, kPlain>(staged, headOf(p.output, work.batch, work.head),
                                                  p.output.row_stride, ops::warp() * Shape::kRowsPerWarp,
                                                  work.row0, work.row_end, p.v_head_dim, p.vector_copies);
  }
};

}  // namespace flash_export::kernels
