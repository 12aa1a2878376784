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

#include "products.h"
#include "sequences.h"
#include "tile_io.h"
#include "tile_softmax.h"
#include "variants.h"

namespace flash_export::kernels {

template <class Element_, int kHeadDim, int kTileQ, int kTileKv, int kWarps, Features kFeatures>
struct Forward {
  using Element = Element_;
  using Shape = TileShape<int(sizeof(Element)), kHeadDim, kTileQ, kTileKv, kWarps>;
  static constexpr bool kIsFloat = sizeof(Element) == 4;
  static constexpr bool kPlain = kFeatures != Features::kGeneral;
  static constexpr bool kPaged = kFeatures == Features::kPaged;  // always; a General kernel asks
  static_assert(!(kIsFloat && kPlain), "fp32 keeps its scores in natural units");
  using Products = std::conditional_t<kIsFloat, ScalarProducts<Shape>, MmaProducts<Element, Shape>>;
  using Softmax =
      std::conditional_t<kIsFloat, PreciseSoftmax, std::conditional_t<kPlain, FoldedSoftmax, NaturalSoftmax>>;
  static constexpr int kFragmentsQ = Shape::kFragmentsQ;

  // One block's share: rows row0 ... row_end - 1 of one head, or one pack of heads, of one batch.
  struct Work {
    int batch, head, row0, row_end;  // head: the first of the pack
    int split;
    Band band;
    QueryRows<Element> query, output;
    KeyRows<Element> key, value;
  };

  struct State {
    PagesAhead<Shape, kTileKv> ahead;  // Paged kernels: of the tile whose keys were copied last
    typename Products::Output out;
    RowState rows[kFragmentsQ][2];  // sums of this lane's columns until endOf() joins a quad
  };

  static FLASH_DEVICE void run(ForwardParams const& p) {
    Work const work = locate(p);
    if (work.row0 >= work.row_end) return;  // a packed sequence shorter than the longest
    KeyTiles const all = keyTiles(work.band, placeOf(work.row0, p.pack).query,
                                  placeOf(work.row_end - 1, p.pack).query + 1, kTileKv);
    KeyTiles const tiles = p.splits == 1 ? all : splitOf(all, work.split, p.splits);
    uint32_t const shared = ops::sharedBase();
    State state;
    clear(state);
    if (tiles.begin < tiles.end) {
      loadTile<Shape, kTileQ, kPlain>(shared + Shape::kQueryOffset, work.query, work.row0, work.row_end,
                                      p.head_dim, p.vector_copies);
      loadKeys(p, work, state, tiles.end - 1, false);
      if (kPaged && !tiles.needsMask(tiles.end - 1)) {
        lookAhead(p, work, state, tiles.end - 1);
        state.ahead.settle(p.last_page);
      }
      visit(p, work, state, tiles);
    }
    if (p.splits == 1) {
      finish(p, work, state);
    } else {
      finishPart(p, work, state);
    }
  }

 private:
  // Splits are the grid's fastest axis, then tiles of rows, last first: with a causal mask those are the
  // longest, and short work at the end fills the device better. Heads that share keys follow each other.
  static FLASH_DEVICE Work locate(ForwardParams const& p) {
    int const row_tiles = int(ceilDiv(p.seqlen_q * p.pack, kTileQ));
    int const packs = p.q_heads / p.pack;
    int64_t block = ops::blockIndex();
    Work w;
    w.split = 0;
    if (p.splits > 1) {
      w.split = int(block % p.splits);
      block /= p.splits;
    }
    int64_t const batch_pack = block / row_tiles;
    w.row0 = (row_tiles - 1 - int(block - batch_pack * row_tiles)) * kTileQ;
    w.batch = int(batch_pack / packs);
    w.head = int(batch_pack - int64_t(w.batch) * packs) * p.pack;
    Span const queries = queriesOf(p, w.batch), keys = keysOf(p, w.batch);
    w.row_end = smaller(w.row0 + kTileQ, queries.count * p.pack);
    w.band = makeBand(p.causal, p.diagonal, p.window_left, p.window_right, queries.count, keys.count);
    int const kv_head = w.head / p.group;
    int const kv_batch = paged(p) ? 0 : w.batch;  // a page table names the batches' pages
    w.query = {headOf(p.query, w.batch, w.head, queries.first), p.query.row_stride, p.query.head_stride,
               p.pack};
    w.output = {headOf(p.output, w.batch, w.head, queries.first), p.output.row_stride, p.output.head_stride,
                p.pack};
    w.key = {headOf(p.key, kv_batch, kv_head, keys.first), p.key.row_stride};
    w.value = {headOf(p.value, kv_batch, kv_head, keys.first), p.value.row_stride};
    return w;
  }

  static FLASH_DEVICE Element* headOf(FlashTensor const& tensor, int batch, int head, int first_row) {
    return static_cast<Element*>(tensor.data) + int64_t(batch) * tensor.batch_stride +
           int64_t(head) * tensor.head_stride + int64_t(first_row) * tensor.row_stride;
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
        state.rows[m][h].clear();
      }
    }
  }

  static FLASH_DEVICE bool paged(ForwardParams const& p) {
    return kPaged || (!kPlain && p.page_table != nullptr);
  }

  static FLASH_DEVICE PagedRows<Element> inPages(ForwardParams const& p, Work const& work,
                                                 KeyRows<Element> const& rows, int64_t page_stride) {
    return {rows.first,
            uint32_t(rows.row_stride * int64_t(sizeof(Element))),
            uint32_t(page_stride * int64_t(sizeof(Element))),
            p.page_table + int64_t(work.batch) * p.page_table_stride,
            p.page_bits,
            p.last_page};
  }

  static FLASH_DEVICE void lookAhead(ForwardParams const& p, Work const& work, State& state, int tile) {
    state.ahead.look(inPages(p, work, work.key, p.key.batch_stride), tile * kTileKv);
  }

  // Each starts the copy of a tile; `whole`, a constant: none of its rows is past kv_length. In Paged kernels
  // the pages of a whole tile have been looked up.
  static FLASH_DEVICE void loadKeys(ForwardParams const& p, Work const& work, State& state, int tile,
                                    bool whole) {
    if (kPaged && whole) state.ahead.settle(p.last_page);
    loadKeyTile(p, work, state, Shape::kKeyOffset, work.key, p.key.batch_stride, tile * kTileKv, p.head_dim,
                whole);
  }

  static FLASH_DEVICE void loadValues(ForwardParams const& p, Work const& work, State const& state, int tile,
                                      bool whole) {
    loadKeyTile(p, work, state, Shape::kValueOffset, work.value, p.value.batch_stride, tile * kTileKv,
                p.v_head_dim, whole);
  }

  static FLASH_DEVICE void loadKeyTile(ForwardParams const& p, Work const& work, State const& state,
                                       uint32_t offset, KeyRows<Element> const& rows, int64_t page_stride,
                                       int row0, int head_dim, bool whole) {
    uint32_t const target = ops::sharedBase() + offset;
    int const row_end = work.band.kv_length;
    if (kPlain && whole) {
      if constexpr (kPaged) {
        loadWholeTile<Shape, kTileKv>(target, inPages(p, work, rows, page_stride), state.ahead, row0,
                                      head_dim);
      } else {
        loadWholeTile<Shape, kTileKv>(target, rows, row0, head_dim);
      }
    } else if (paged(p)) {
      loadTile<Shape, kTileKv, kPlain>(target, inPages(p, work, rows, page_stride), row0, row_end, head_dim,
                                       p.vector_copies);
    } else {
      loadTile<Shape, kTileKv, kPlain>(target, rows, row0, row_end, head_dim, p.vector_copies);
    }
    ops::copyAsyncCommit();
  }

  static FLASH_DEVICE void step(ForwardParams const& p, Work const& work, State& state, KeyTiles const& tiles,
                                int tile, bool masked) {
    uint32_t const shared = ops::sharedBase();
    ops::copyAsyncWait<0>();
    ops::syncThreads();  // K(n) is there for all; all are done with V(n+1)
    loadValues(p, work, state, tile, !masked);
    if (kPaged && tile > tiles.begin) lookAhead(p, work, state, tile - 1);
    typename Products::Scores s;
    forEach(s, [](float& score) { score = 0.0f; });
    Products::scores(s, shared + Shape::kQueryOffset, shared + Shape::kKeyOffset);
    if (!Softmax::kRawScores) addScoreTerms(p, work, s, tile * kTileKv);
    if (masked) mask(p, work, s, tile * kTileKv);
    TileSoftmax<Shape, Softmax>::weigh(Softmax(p), state.rows, s, state.out);
    ops::copyAsyncWait<0>();
    ops::syncThreads();  // V(n) is there for all; all are done with K(n)
    if (tile > tiles.begin) {
      // Only the last tile of all may lack keys, and no step loads that one.
      loadKeys(p, work, state, tile - 1, true);
    }
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
        RowPlace const place = placeOf(row, p.pack);
        BiasElement const* const first = head + int64_t(place.head) * p.bias_stride[1] +
                                         int64_t(place.query) * p.bias_stride[2] +
                                         int64_t(first_key) * p.bias_stride[3];
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          FLASH_UNROLL
          for (int e = 0; e < 2; ++e) {
            bool const there = row < work.row_end && first_key + n * 8 + e < work.band.kv_length;
            float& score = s[m][n][h * 2 + e];
            if (there) {
              float const bias = ops::loadFloat(first + int64_t(n * 8 + e) * p.bias_stride[3]);
              float const sum = ops::multiplyAdd(score, factor, bias);
              score = bias == kNegativeInfinity ? kNegativeInfinity : sum;  // it hides a NaN too
            }
          }
        }
      }
    }
  }

  static FLASH_DEVICE void mask(ForwardParams const& p, Work const& work, typename Products::Scores& s,
                                int key0) {
    FLASH_UNROLL
    for (int m = 0; m < kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int j = 0; j < 4; ++j) {
        KeySpan const visible = visibleKeys(work.band, placeOf(rowOf(work, m, j >> 1), p.pack).query, key0);
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          int const column = n * 8 + fragmentColumn(ops::lane(), j);
          if (column < visible.first || column >= visible.last) s[m][n][j] = kNegativeInfinity;
        }
      }
    }
  }

  // The sum of a whole row, of the four lanes that hold it.
  static FLASH_DEVICE float sumOf(State const& state, int m, int h) {
    float sum = state.rows[m][h].sum;
    sum += ops::shuffleXor(sum, 1);
    return sum + ops::shuffleXor(sum, 2);
  }

  // Divides by the row sums, stages the warp's rows in Q's place and writes them; writes the lse. The last
  // barrier of step() lies behind every read of Q.
  static FLASH_DEVICE void finish(ForwardParams const& p, Work const& work, State const& state) {
    uint32_t const staged = ops::sharedBase() + Shape::kQueryOffset;
    int const first_row = queriesOf(p, work.batch).first;
    FLASH_UNROLL
    for (int m = 0; m < kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        int const row = rowOf(work, m, h);
        bool const there = row < work.row_end;
        RowPlace const place = placeOf(row, p.pack);
        float sink = kNegativeInfinity;
        if (p.sinks != nullptr && there) {
          sink = ops::loadGlobal(p.sinks + int64_t(work.head + place.head) * p.sinks_stride);
        }
        RowEnd const end =
            endRow<Softmax>(Softmax(p).natural(state.rows[m][h].maximum), sumOf(state, m, h), sink);
        if (p.lse != nullptr && there && (ops::lane() & 3) == 0) {
          ops::storeBits(p.lse + lseNumber(p, work.batch, first_row, work.head + place.head, place.query),
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
    storeRows<Shape, Shape::kRowsPerWarp, kPlain>(staged, work.output, ops::warp() * Shape::kRowsPerWarp,
                                                  work.row0, work.row_end, p.v_head_dim, p.vector_copies);
  }

  // What this block knows of its rows, in fp32 and without the sink, for combine.h.
  static FLASH_DEVICE void finishPart(ForwardParams const& p, Work const& work, State const& state) {
    int64_t const part = int64_t(work.split) * rowCount(p.batch, p.q_heads, p.seqlen_q);
    FLASH_UNROLL
    for (int m = 0; m < kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        float const sum = sumOf(state, m, h);
        float const multiplier = sum == 0.0f ? 0.0f : ops::roundedDivide(1.0f, sum);
        int const row = rowOf(work, m, h);
        if (row >= work.row_end) continue;
        RowPlace const place = placeOf(row, p.pack);
        int64_t const number = part + rowNumber(p, work.batch, work.head + place.head, place.query);
        if ((ops::lane() & 3) == 0) {
          float const maximum = Softmax(p).natural(state.rows[m][h].maximum);
          ops::storeBits(p.partial_max + number, ops::bitsOf(maximum));
          ops::storeBits(p.partial_sum + number, ops::bitsOf(sum));
        }
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsOut; ++n) {
          FLASH_UNROLL
          for (int e = 0; e < 2; ++e) {
            int const column = n * 8 + fragmentColumn(ops::lane(), e);
            if (column < p.v_head_dim) {
              ops::storeBits(p.partial_output + number * p.v_head_dim + column,
                             ops::bitsOf(state.out[m][n][h * 2 + e] * multiplier));
            }
          }
        }
      }
    }
  }
};

}  // namespace flash_export::kernels
