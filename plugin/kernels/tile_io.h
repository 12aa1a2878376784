// SPDX-License-Identifier: Apache-2.0
// Tiles between global memory and swizzled shared memory. Rows past the end and columns past the head dim are
// zero in shared memory and are never read from, nor written to, global memory.
#pragma once
#include "device_ops.h"
#include "geometry.h"

namespace flash_export::kernels {

// Up to one chunk of elements, one by one: for rows that do not start on 16 bytes.
template <class Element>
FLASH_DEVICE ops::Words4 gatherChunk(Element const* source, int count) {
  constexpr int kElements = kChunkBytes / int(sizeof(Element));
  constexpr int kPerWord = 4 / int(sizeof(Element));
  ops::Words4 chunk = {};
  FLASH_UNROLL
  for (int i = 0; i < kElements; ++i) {
    if (i < count) chunk.w[i / kPerWord] |= ops::loadBits(source + i) << (i % kPerWord * 16);
  }
  return chunk;
}

template <class Element>
FLASH_DEVICE void scatterChunk(Element* target, ops::Words4 chunk, int count) {
  constexpr int kElements = kChunkBytes / int(sizeof(Element));
  constexpr int kPerWord = 4 / int(sizeof(Element));
  FLASH_UNROLL
  for (int i = 0; i < kElements; ++i) {
    if (i < count) ops::storeBits(target + i, chunk.w[i / kPerWord] >> (i % kPerWord * 16));
  }
}

// Starts the copy of rows row0 ... row0 + kRows - 1 into the tile at `tile`; rows from `row_end` on are
// zeros. `all_there`, a constant: there are none such, and a copy costs an addition instead of a dozen
// instructions for its address. The caller commits and waits.
template <class Shape, int kRows, bool kVectorOnly, class Element>
FLASH_DEVICE void loadTile(uint32_t tile, Element const* source, int64_t row_stride, int row0, int row_end,
                           int head_dim, bool vector_copies, bool all_there) {
  constexpr int kRowStep = Shape::kThreads / Shape::kChunks;
  int const chunk = ops::threadIndex() % Shape::kChunks;
  int const first_row = ops::threadIndex() / Shape::kChunks;
  int const count = smaller(head_dim - chunk * Shape::kChunkElements, Shape::kChunkElements);
  Element const* const column = source + chunk * Shape::kChunkElements;
  if (kVectorOnly && all_there) {
    Element const* from = (count > 0 ? column : source) + int64_t(row0 + first_row) * row_stride;
    int64_t const step = kRowStep * row_stride;
    FLASH_UNROLL_4
    for (int i = 0; i < kRows / kRowStep; ++i) {
      ops::copyAsync(tile + swizzled(first_row + i * kRowStep, chunk, Shape::kChunks), from,
                     count > 0 ? kChunkBytes : 0);
      from += step;
    }
  } else if (kVectorOnly || vector_copies) {
    FLASH_UNROLL_4
    for (int i = 0; i < kRows / kRowStep; ++i) {
      int const row = first_row + i * kRowStep;
      bool const there = count > 0 && row0 + row < row_end;
      Element const* const from = there ? column + int64_t(row0 + row) * row_stride : source;
      ops::copyAsync(tile + swizzled(row, chunk, Shape::kChunks), from, there ? kChunkBytes : 0);
    }
  } else {
    FLASH_NO_UNROLL
    for (int row = first_row; row < kRows; row += kRowStep) {
      bool const there = row0 + row < row_end;
      ops::storeShared128(
          tile + swizzled(row, chunk, Shape::kChunks),
          gatherChunk(column + (there ? int64_t(row0 + row) * row_stride : 0), there ? count : 0));
    }
  }
}

// Writes one warp's `kRows` rows of the tile, from row `first_row` of it on, to global rows row0 + ...; rows
// from `row_end` on are not written. The warp's lanes have written those rows of the tile and met at a
// barrier since.
template <class Shape, int kRows, bool kVectorOnly, class Element>
FLASH_DEVICE void storeRows(uint32_t tile, Element* target, int64_t row_stride, int first_row, int row0,
                            int row_end, int head_dim, bool vector_copies) {
  FLASH_UNROLL_4
  for (int i = 0; i < kRows * Shape::kChunks / kWarpSize; ++i) {
    int const index = ops::lane() + i * kWarpSize;
    int const row = first_row + index / Shape::kChunks;
    int const chunk = index % Shape::kChunks;
    int const count = smaller(head_dim - chunk * Shape::kChunkElements, Shape::kChunkElements);
    if (row0 + row < row_end && count > 0) {
      ops::Words4 const words = ops::loadShared128(tile + swizzled(row, chunk, Shape::kChunks));
      Element* const to = target + int64_t(row0 + row) * row_stride + chunk * Shape::kChunkElements;
      if (kVectorOnly || vector_copies) {
        ops::storeGlobal128(to, words);
      } else {
        scatterChunk(to, words, count);
      }
    }
  }
}

}  // namespace flash_export::kernels
