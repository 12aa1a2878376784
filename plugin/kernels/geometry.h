// SPDX-License-Identifier: Apache-2.0
// Where things are: which keys a query row sees, which tiles that makes, where a tile lies in shared memory.
// Pure integer functions, the same on host and device; tests/plugin/kernels/geometry_test.cpp checks them
// directly.
#pragma once
#include <cstdint>

#include "flash_attention.h"

#ifdef __CUDACC__
#define FLASH_HOST_DEVICE __host__ __device__
#else
#define FLASH_HOST_DEVICE
#endif

namespace flash_export::kernels {

constexpr int kWarpSize = 32;
// What one lane copies at once, and one row of an 8x8 matrix of 16-bit elements.
constexpr int kChunkBytes = 16;
// Longest sequence: rows, keys, and their sums and differences with kUnlimited stay inside an int32.
constexpr int64_t kMaxSeqlen = int64_t{1} << 28;
// Most keys of a row: a sum of equal weights in fp32 counts no further.
constexpr int64_t kMaxKeys = int64_t{1} << 24;
constexpr int kUnlimited = 1 << 30;
// Shared memory that one block may have on every architecture from sm_80 on (sm_86, sm_89 and sm_120 are the
// smallest).
constexpr int kMaxSharedBytes = 99 * 1024;

FLASH_HOST_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
FLASH_HOST_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
FLASH_HOST_DEVICE constexpr int64_t ceilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The keys that query rows see: row i sees key j iff i + lower <= j <= i + upper and 0 <= j < kv_length.
struct Band {
  int lower, upper, kv_length;
};

// causal and window as the operator spells them (docs/op.md); a window side of -1 is off. `kv_length` is this
// batch's, so a bottom-right diagonal ends at its last key.
FLASH_HOST_DEVICE constexpr Band makeBand(int causal, int diagonal, int window_left, int window_right,
                                          int seqlen_q, int kv_length) {
  int const offset = diagonal != 0 ? kv_length - seqlen_q : 0;
  // A side beyond 2^29 reaches every key from every row: |i + offset| < 2^29.
  bool const left_open = window_left < 0 || window_left >= kUnlimited / 2;
  bool const right_open = window_right < 0 || window_right >= kUnlimited / 2;
  int const upper = causal != 0 ? offset : (right_open ? kUnlimited : offset + window_right);
  return {left_open ? -kUnlimited : offset - window_left, upper, kv_length};
}

// The keys of one row, counted from key `key0`: those in [first, last).
struct KeySpan {
  int first, last;
};

FLASH_HOST_DEVICE constexpr KeySpan visibleKeys(Band band, int row, int key0) {
  return {row + band.lower - key0, smaller(band.kv_length, row + band.upper + 1) - key0};
}

// Tiles of keys that a tile of query rows needs: those in [begin, end). Every row sees every key of those in
// [full_begin, full_end); the others must be masked.
struct KeyTiles {
  int begin, end, full_begin, full_end;

  FLASH_HOST_DEVICE constexpr bool needsMask(int tile) const { return tile < full_begin || tile >= full_end; }
};

// Rows row0 <= i < row_end, row0 < row_end; rows of the tile past the last query are no rows.
FLASH_HOST_DEVICE constexpr KeyTiles keyTiles(Band band, int row0, int row_end, int tile_kv) {
  KeySpan const first_row = visibleKeys(band, row0, 0);
  KeySpan const last_row = visibleKeys(band, row_end - 1, 0);
  int const begin = larger(first_row.first, 0) / tile_kv;
  int const end = (larger(last_row.last, 0) + tile_kv - 1) / tile_kv;
  int const full_begin = (larger(last_row.first, 0) + tile_kv - 1) / tile_kv;
  int const full_end = larger(first_row.last, 0) / tile_kv;
  return {begin, end, full_begin, full_end};
}

// The part of the key tiles that one of several blocks takes which share the rows: parts differ by a tile at
// most, and the last ones may be empty.
FLASH_HOST_DEVICE constexpr KeyTiles splitOf(KeyTiles all, int split, int splits) {
  int const each = (larger(all.end - all.begin, 0) + splits - 1) / splits;
  int const begin = smaller(all.begin + split * each, all.end);
  return {begin, smaller(begin + each, all.end), larger(all.full_begin, begin), all.full_end};
}

// Rows of a tensor that belong to one batch entry.
struct Span {
  int first, count;
};

// Rows `first` to `end` of packed sequences, as a table says that may be wrong: never outside 0 ... total,
// and `longest` rows at most.
FLASH_HOST_DEVICE constexpr Span spanOf(int first, int end, int total, int longest) {
  int const from = smaller(larger(first, 0), total);
  int const to = smaller(larger(end, 0), total);  // before the difference, which need not fit 32 bits else
  return {from, smaller(larger(to - from, 0), longest)};
}

// Keys in pages of 2^page_bits: where key `key` is.
struct PagePlace {
  int entry, row;  // of the table; of the page
};

constexpr int kSmallestPage = 16;
constexpr int kLargestPage = 256;

FLASH_HOST_DEVICE constexpr PagePlace pagePlaceOf(int key, int page_bits) {
  return {key >> page_bits, key & ((1 << page_bits) - 1)};
}

// The page that a table's entry names; one that is none becomes the last, so that nothing outside is touched.
FLASH_HOST_DEVICE constexpr uint32_t pageOf(int32_t entry, uint32_t last_page) {
  return uint32_t(entry) < last_page ? uint32_t(entry) : last_page;
}

// Query heads that share a key-value head may be packed into the rows of one tile, so that few queries (one,
// while decoding) fill it and keys are read once for all of them: row r is query r / pack of head r % pack.
struct RowPlace {
  int query, head;  // of the pack
};

FLASH_HOST_DEVICE constexpr RowPlace placeOf(int row, int pack) {
  if (pack == 1) return {row, 0};
  int const query = int(unsigned(row) / unsigned(pack));
  return {query, row - query * pack};
}

// How many heads of a group to pack: all, if their queries fill half a tile of rows at most.
FLASH_HOST_DEVICE constexpr int packOf(int group, int64_t seqlen_q, int tile_q) {
  return 2 * seqlen_q <= tile_q ? group : 1;
}

// Where few rows leave most multiprocessors idle, their keys are split over several blocks whose results are
// combined. Rows are at most kMaxSplitRows a block and blocks at most kMaxSplitBlocks, so the partial
// results are small whatever the problem is.
constexpr int kMaxSplits = 64;
constexpr int kMaxSplitRows = kFlashMaxSplitQueries;
constexpr int kMaxSplitBlocks = 256;

// The fewest splits with at least 85 % of the best use of the last wave of blocks (the heuristic of flash-
// attention's num_splits, re-derived): `blocks` are those without a split, one a tile of rows.
FLASH_HOST_DEVICE constexpr int splitCount(int64_t blocks, int key_tiles, int multiprocessors) {
  if (blocks <= 0 || 5 * blocks >= 4 * int64_t(multiprocessors)) return 1;
  int const most = smaller(smaller(key_tiles, kMaxSplits), int(kMaxSplitBlocks / blocks));
  // Use of a wave in 1/1024: blocks over the places in all the waves that they need.
  int64_t best = 0;
  for (int splits = 1; splits <= most; ++splits) {
    int64_t const waves = ceilDiv(blocks * splits, multiprocessors);
    int64_t const use = 1024 * blocks * splits / (waves * multiprocessors);
    best = use > best ? use : best;
  }
  for (int splits = 1; splits <= most; ++splits) {
    int64_t const waves = ceilDiv(blocks * splits, multiprocessors);
    if (100 * (1024 * blocks * splits / (waves * multiprocessors)) >= 85 * best) return splits;
  }
  return 1;
}

// Chunk `chunk` of row `row` lies at chunk position `chunk ^ rowKey(row)`: then the 8 rows of one ldmatrix
// phase, and the 8 lanes of one 128-bit access, touch 8 different groups of 4 banks. A row of 4 chunks is
// half of the 32 banks, so there two neighbours share a key.
FLASH_HOST_DEVICE constexpr uint32_t rowKey(int row, int chunks_per_row) {
  return chunks_per_row >= 8 ? uint32_t(row) & 7u : (uint32_t(row) >> 1) & 3u;
}

// Byte offset of a chunk in a tile. rowKey depends on row mod 8 alone and keys the low bits of the chunk, so
// for a lane's own (row, chunk): swizzled(row + 8*m, chunk ^ c) == (swizzled(row, chunk) ^ 16*c) +
// 8*m*row_bytes. One XOR an address in the hot loops.
FLASH_HOST_DEVICE constexpr uint32_t swizzled(int row, int chunk, int chunks_per_row) {
  return (uint32_t(row) * uint32_t(chunks_per_row) + (uint32_t(chunk) ^ rowKey(row, chunks_per_row))) *
         kChunkBytes;
}

// Where element j of a lane's 4 accumulators of a 16x8 product lies (PTX ISA, mma.m16n8k16, fragment of D).
FLASH_HOST_DEVICE constexpr int fragmentRow(int lane, int j) { return (lane >> 2) + (j >> 1) * 8; }
FLASH_HOST_DEVICE constexpr int fragmentColumn(int lane, int j) { return (lane & 3) * 2 + (j & 1); }

// One block's tiles and its shared-memory map: Q [tile_q, D], K [tile_kv, D], V [tile_kv, D]; O takes Q's
// place.
template <int kElementBytes_, int kHeadDim_, int kTileQ_, int kTileKv_, int kWarps_>
struct TileShape {
  static constexpr int kElementBytes = kElementBytes_;
  static constexpr int kHeadDim = kHeadDim_;  // of the tile; smaller head dims are padded with zeros
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileKv = kTileKv_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * kWarpSize;

  static constexpr int kRowsPerWarp = kTileQ / kWarps;
  static constexpr int kFragmentsQ = kRowsPerWarp / 16;
  static constexpr int kFragmentsKv = kTileKv / 8;
  static constexpr int kFragmentsOut = kHeadDim / 8;

  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  static constexpr int kChunkElements = kChunkBytes / kElementBytes;
  static constexpr int kChunks = kRowBytes / kChunkBytes;

  static constexpr uint32_t kQueryOffset = 0;
  static constexpr uint32_t kKeyOffset = kQueryOffset + kTileQ * kRowBytes;
  static constexpr uint32_t kValueOffset = kKeyOffset + kTileKv * kRowBytes;
  static constexpr int kSharedBytes = int(kValueOffset) + kTileKv * kRowBytes;

  static_assert(kSharedBytes <= kMaxSharedBytes,
                "the tiles do not fit the shared memory of sm_86, sm_89 and sm_120");
  static_assert((kChunks & (kChunks - 1)) == 0 && kChunks >= 4,
                "the swizzle needs a power of two of chunks, 4 at least");
  static_assert(kTileQ % (16 * kWarps) == 0, "every warp takes whole fragments of 16 query rows");
  static_assert(kTileKv % 16 == 0, "the second product takes keys 16 at a time");
  static_assert(kThreads % kChunks == 0, "a thread keeps one chunk column while it copies a tile");
  static_assert(kTileQ * kChunks % kThreads == 0 && kTileKv * kChunks % kThreads == 0,
                "every thread copies the same number of chunks");
};

}  // namespace flash_export::kernels
