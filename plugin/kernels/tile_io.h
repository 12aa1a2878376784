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

// Where the rows of a tile of keys or values start.
template <class Element>
struct KeyRows {
  Element* first;
  int64_t row_stride;
  FLASH_DEVICE Element* at(int row) const { return first + int64_t(row) * row_stride; }
};

// The same in pages anywhere in a pool; `first` is the first row of page 0. Steps of 32 bits cost one
// instruction each to multiply and add, those of 64 bits three.
template <class Element>
struct PagedRows {
  Element* first;
  uint32_t row_bytes, page_bytes;
  int32_t const* table;
  int page_bits;
  uint32_t last_page;
  FLASH_DEVICE int32_t entryOf(int row) const {
    return ops::loadGlobal(table + pagePlaceOf(row, page_bits).entry);
  }
  FLASH_DEVICE Element* in(uint32_t page, int row) const {
    char* const of_page = reinterpret_cast<char*>(first) + uint64_t(page) * page_bytes;
    return reinterpret_cast<Element*>(of_page +
                                      uint64_t(uint32_t(pagePlaceOf(row, page_bits).row)) * row_bytes);
  }
  FLASH_DEVICE Element* at(int row) const { return in(pageOf(entryOf(row), last_page), row); }
};

// The pages of the rows that a thread copies of one tile. The table is read a product ahead of the first
// copy, of the keys, and the values' copy finds the numbers here: on its own each would wait for the table.
template <class Shape, int kRows>
struct PagesAhead {
  static constexpr int kRowStep = Shape::kThreads / Shape::kChunks;
  static constexpr int kCopies = kRows / kRowStep;
  static_assert(kRows % kRowStep == 0 && (kRowStep & (kRowStep - 1)) == 0, "rowOf adds without a carry");
  int32_t entries[kCopies];
  uint32_t pages[kCopies];

  // Of a tile that starts at row0, a multiple of kRows.
  static FLASH_DEVICE int rowOf(int row0, int copy) {
    return (row0 + ops::threadIndex() / Shape::kChunks) | (copy * kRowStep);
  }

  template <class Element>
  FLASH_DEVICE void look(PagedRows<Element> const& rows, int row0) {
    FLASH_UNROLL
    for (int i = 0; i < kCopies; ++i) entries[i] = rows.entryOf(rowOf(row0, i));
  }

  FLASH_DEVICE void settle(uint32_t last_page) {
    FLASH_UNROLL
    for (int i = 0; i < kCopies; ++i) pages[i] = pageOf(entries[i], last_page);
  }
};

// The same of queries or outputs, whose rows may be packed heads.
template <class Element>
struct QueryRows {
  Element* first;
  int64_t row_stride, head_stride;
  int pack;
  FLASH_DEVICE Element* at(int row) const {
    RowPlace const place = placeOf(row, pack);
    return first + int64_t(place.query) * row_stride + int64_t(place.head) * head_stride;
  }
};

// Starts the copy of rows row0 ... row0 + kRows - 1 into the tile at `tile`; rows from `row_end` on are
// zeros. The caller commits and waits.
template <class Shape, int kRows, bool kVectorOnly, class Rows>
FLASH_DEVICE void loadTile(uint32_t tile, Rows const& rows, int row0, int row_end, int head_dim,
                           bool vector_copies) {
  constexpr int kRowStep = Shape::kThreads / Shape::kChunks;
  int const chunk = ops::threadIndex() % Shape::kChunks;
  int const first_row = ops::threadIndex() / Shape::kChunks;
  int const count = smaller(head_dim - chunk * Shape::kChunkElements, Shape::kChunkElements);
  if (kVectorOnly || vector_copies) {
    FLASH_UNROLL_4
    for (int i = 0; i < kRows / kRowStep; ++i) {
      int const row = first_row + i * kRowStep;
      bool const there = count > 0 && row0 + row < row_end;
      auto const* const from = there ? rows.at(row0 + row) + chunk * Shape::kChunkElements : rows.first;
      ops::copyAsync(tile + swizzled(row, chunk, Shape::kChunks), from, there ? kChunkBytes : 0);
    }
  } else {
    FLASH_NO_UNROLL
    for (int row = first_row; row < kRows; row += kRowStep) {
      bool const there = count > 0 && row0 + row < row_end;
      auto const* const from = there ? rows.at(row0 + row) + chunk * Shape::kChunkElements : rows.first;
      ops::storeShared128(tile + swizzled(row, chunk, Shape::kChunks), gatherChunk(from, there ? count : 0));
    }
  }
}

// The same of pages; the loop stays a loop, which keeps it small beside the other.
template <class Shape, int kRows, bool kVectorOnly, class Element>
FLASH_DEVICE void loadTile(uint32_t tile, PagedRows<Element> const& rows, int row0, int row_end, int head_dim,
                           bool vector_copies) {
  int const chunk = ops::threadIndex() % Shape::kChunks;
  int const count = smaller(head_dim - chunk * Shape::kChunkElements, Shape::kChunkElements);
  FLASH_NO_UNROLL
  for (int row = ops::threadIndex() / Shape::kChunks; row < kRows; row += Shape::kThreads / Shape::kChunks) {
    bool const there = count > 0 && row0 + row < row_end;
    auto const* const from = there ? rows.at(row0 + row) + chunk * Shape::kChunkElements : rows.first;
    uint32_t const to = tile + swizzled(row, chunk, Shape::kChunks);
    if (kVectorOnly || vector_copies) {
      ops::copyAsync(to, from, there ? kChunkBytes : 0);
    } else {
      ops::storeShared128(to, gatherChunk(from, there ? count : 0));
    }
  }
}

// The same for rows that are all there, in copies of 16 bytes: one costs an addition instead of the dozen
// instructions of an address of its own.
template <class Shape, int kRows, class Element>
FLASH_DEVICE void loadWholeTile(uint32_t tile, KeyRows<Element> const& rows, int row0, int head_dim) {
  constexpr int kRowStep = Shape::kThreads / Shape::kChunks;
  int const chunk = ops::threadIndex() % Shape::kChunks;
  int const first_row = ops::threadIndex() / Shape::kChunks;
  int const bytes = chunk * Shape::kChunkElements < head_dim ? kChunkBytes : 0;  // with 0 nothing is read
  Element const* from = rows.at(row0 + first_row) + chunk * Shape::kChunkElements;
  int64_t const step = kRowStep * rows.row_stride;
  FLASH_UNROLL_4
  for (int i = 0; i < kRows / kRowStep; ++i) {
    ops::copyAsync(tile + swizzled(first_row + i * kRowStep, chunk, Shape::kChunks), from, bytes);
    from += step;
  }
}

// The same of rows in pages that are known.
template <class Shape, int kRows, class Element>
FLASH_DEVICE void loadWholeTile(uint32_t tile, PagedRows<Element> const& rows,
                                PagesAhead<Shape, kRows> const& ahead, int row0, int head_dim) {
  using Ahead = PagesAhead<Shape, kRows>;
  int const chunk = ops::threadIndex() % Shape::kChunks;
  int const first_row = ops::threadIndex() / Shape::kChunks;
  int const bytes = chunk * Shape::kChunkElements < head_dim ? kChunkBytes : 0;
  FLASH_UNROLL
  for (int i = 0; i < Ahead::kCopies; ++i) {
    ops::copyAsync(tile + swizzled(first_row + i * Ahead::kRowStep, chunk, Shape::kChunks),
                   rows.in(ahead.pages[i], Ahead::rowOf(row0, i)) + chunk * Shape::kChunkElements, bytes);
  }
}

// Writes one warp's `kRows` rows of the tile, from row `first_row` of it on, to global rows row0 + ...; rows
// from `row_end` on are not written. The warp's lanes have written those rows of the tile and met at a
// barrier since.
template <class Shape, int kRows, bool kVectorOnly, class Element>
FLASH_DEVICE void storeRows(uint32_t tile, QueryRows<Element> const& rows, int first_row, int row0,
                            int row_end, int head_dim, bool vector_copies) {
  FLASH_UNROLL_4
  for (int i = 0; i < kRows * Shape::kChunks / kWarpSize; ++i) {
    int const index = ops::lane() + i * kWarpSize;
    int const row = first_row + index / Shape::kChunks;
    int const chunk = index % Shape::kChunks;
    int const count = smaller(head_dim - chunk * Shape::kChunkElements, Shape::kChunkElements);
    if (row0 + row < row_end && count > 0) {
      ops::Words4 const words = ops::loadShared128(tile + swizzled(row, chunk, Shape::kChunks));
      Element* const to = rows.at(row0 + row) + chunk * Shape::kChunkElements;
      if (kVectorOnly || vector_copies) {
        ops::storeGlobal128(to, words);
      } else {
        scatterChunk(to, words, count);
      }
    }
  }
}

}  // namespace flash_export::kernels
