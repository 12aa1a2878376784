// SPDX-License-Identifier: Apache-2.0
// Probes (probes.h) of what the kernels are made of: tiles in shared memory, the two products, pages, the
// combination of splits, appending to a cache.
#pragma once
#include "append.h"
#include "combine.h"
#include "probes.h"
#include "products.h"
#include "tile_io.h"

namespace flash_export::kernels {

using HalfTile = TileShape<2, 64, 64, 64, 4>;
using FloatTile = TileShape<4, 32, 64, 32, 4>;

// As tensors are given to the kernels, which write to none of these.
template <class T>
FLASH_DEVICE T* tensorAt(ProbeParams const& p, int byte) {
  return const_cast<T*>(inputAt<T>(p, byte));
}

// The bytes of `kRows` rows of a tile, where the swizzle put them.
template <class Shape, int kRows>
FLASH_DEVICE void outputTile(ProbeParams const& p, uint32_t tile) {
  for (int i = ops::threadIndex(); i < kRows * Shape::kChunks; i += Shape::kThreads) {
    outputChunk(p, i, ops::loadShared128(tile + i * kChunkBytes));
  }
}

FLASH_DEVICE void landCopies() {
  ops::copyAsyncCommit();
  ops::copyAsyncWait<0>();
  ops::syncThreads();
}

// 64 rows of 64 elements, of which 50 rows of `head_dim` are there; element by element where vectors are off.
template <bool kVectors>
struct Tile {
  using Element = ops::Half;
  static constexpr char const* kName = kVectors ? "tile_of_vectors" : "tile_of_elements";
  static constexpr int kThreads = HalfTile::kThreads, kSharedBytes = HalfTile::kSharedBytes;
  static constexpr int kInBytes = 64 * 128, kOutBytes = 64 * 128;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    KeyRows<Element> const rows{tensorAt<Element>(p, 0), 64};
    loadTile<HalfTile, 64, false>(ops::sharedBase(), rows, 0, 50, kVectors ? 56 : 51, kVectors);
    landCopies();
    outputTile<HalfTile, 64>(p, ops::sharedBase());
  }
};

// Six pages of 16 rows, then a table of six entries: the tile of rows 16 to 79, one of whose pages is none.
struct Pages {
  using Element = ops::Half;
  static constexpr char const* kName = "pages";
  static constexpr int kThreads = HalfTile::kThreads, kSharedBytes = HalfTile::kSharedBytes;
  static constexpr int kPoolBytes = 6 * 16 * 128, kInBytes = kPoolBytes + 32, kOutBytes = 64 * 128;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    PagedRows<Element> const rows{
        tensorAt<Element>(p, 0), 128, 16 * 128, inputAt<int32_t>(p, kPoolBytes) + 1, 4, 5};
    PagesAhead<HalfTile, 64> ahead;
    ahead.look(rows, 0);
    ahead.settle(rows.last_page);
    loadWholeTile<HalfTile, 64>(ops::sharedBase(), rows, ahead, 0, 64);
    landCopies();
    outputTile<HalfTile, 64>(p, ops::sharedBase());
  }
};

// Q, K and V tiles of small integers: scores, then scores . V, every sum exact.
template <class T, class Shape, class Products, int kWhich>
struct ProductsOf {
  using Element = T;
  static constexpr char const* kNames[] = {"products_fp16", "products_bf16", "products_fp32"};
  static constexpr char const* kName = kNames[kWhich];
  static constexpr int kThreads = Shape::kThreads, kSharedBytes = Shape::kSharedBytes;
  static constexpr int kInBytes = Shape::kSharedBytes;
  static constexpr int kScores = Shape::kFragmentsQ * Shape::kFragmentsKv * 4;
  static constexpr int kOutputs = Shape::kFragmentsQ * Shape::kFragmentsOut * 4;
  static constexpr int kOutBytes = kThreads * (kScores + kOutputs) * 4;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    KeyRows<T> const rows{tensorAt<T>(p, 0), Shape::kHeadDim};
    constexpr int kRows = Shape::kTileQ + 2 * Shape::kTileKv;
    loadWholeTile<Shape, kRows>(ops::sharedBase(), rows, 0, Shape::kHeadDim);
    landCopies();
    typename Products::Scores s = {};
    typename Products::Output o = {};
    Products::scores(s, ops::sharedBase() + Shape::kQueryOffset, ops::sharedBase() + Shape::kKeyOffset);
    Products::accumulate(o, s, ops::sharedBase() + Shape::kValueOffset);
    int const first = ops::threadIndex() * (kScores + kOutputs);
    for (int i = 0; i < kScores; ++i) outputFloat(p, first + i, (&s[0][0][0])[i]);
    for (int i = 0; i < kOutputs; ++i) outputFloat(p, first + kScores + i, (&o[0][0][0])[i]);
  }
};

// Three splits of two heads and two queries, 40 columns: partial outputs, then their maxima, sums, and two
// sinks.
struct CombineParts {
  using Element = float;
  static constexpr char const* kName = "combine";
  static constexpr int kSplits = 3, kRows = 4, kColumns = 40;
  static constexpr int kThreads = Combine<float>::kThreads, kSharedBytes = 0;
  static constexpr int kInBytes = (kSplits * kRows * (kColumns + 2) + 2) * 4,
                       kOutBytes = kRows * (kColumns + 1) * 4;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    ForwardParams q{};
    q.batch = 1;
    q.q_heads = q.kv_heads = 2;
    q.group = q.pack = 1;
    q.seqlen_q = 2;
    q.v_head_dim = kColumns;
    q.splits = kSplits;
    float* const in = tensorAt<float>(p, 0);
    q.partial_output = in;
    q.partial_max = in + kSplits * kRows * kColumns;
    q.partial_sum = q.partial_max + kSplits * kRows;
    q.sinks = q.partial_sum + kSplits * kRows;
    q.sinks_stride = 1;
    q.output = {p.out, 0, 2 * kColumns, kColumns};
    q.lse = reinterpret_cast<float*>(p.out) + kRows * kColumns;
    Combine<float>::run(q);
  }
};

// Two rows of two heads behind the 15 that a cache of two pages of 16 holds: one falls into each page.
struct AppendRows {
  using Element = ops::Half;
  static constexpr char const* kName = "append";
  static constexpr int kRowBytes = 64, kNewBytes = 2 * 2 * kRowBytes, kPageBytes = 16 * 2 * kRowBytes;
  static constexpr int kThreads = Append<Element>::kThreads, kSharedBytes = 0;
  static constexpr int kInBytes = 2 * kNewBytes + 16, kOutBytes = 2 * 2 * kPageBytes + 16;

  static FLASH_DEVICE void run(ProbeParams const& p) {
    AppendParams a{};
    auto* const in = tensorAt<unsigned char>(p, 0);
    a.key = {in, 0, 32, 64};
    a.value = {in + kNewBytes, 0, 32, 64};
    a.key_cache = {p.out, kPageBytes / 2, 32, 64};
    a.value_cache = {p.out + 2 * kPageBytes, kPageBytes / 2, 32, 64};
    a.batch = 1;
    a.heads = a.seqlen_new = 2;
    a.head_dim = a.v_head_dim = 32;
    a.capacity = 32;
    a.vector_copies = true;
    a.kv_lengths = inputAt<int32_t>(p, 2 * kNewBytes);
    a.lengths_after = reinterpret_cast<int32_t*>(p.out + 4 * kPageBytes);
    a.page_table = a.kv_lengths + 1;
    a.page_bits = 4;
    a.page_count = 2;
    Append<Element>::run(a);
  }
};

}  // namespace flash_export::kernels
