// SPDX-License-Identifier: Apache-2.0
// What the CPU kernels take: rows of scores that share their keys and values. No layouts, no heads, no masks:
// those are resolved when the rows are made (attention.cpp).
//
// This header and all that the kernels include must define no function with external linkage, inline ones
// and templates of the standard library among them: each kernel source is compiled for another instruction
// set, and the linker would keep one copy of such a function for all of them.
#pragma once
#include <cstdint>

namespace flash_export::cpu {

// One query of one head, and the keys that it sees.
struct Row {
  void const* query;  // [D], of the problem's dtype
  void const* bias;   // its element for key 0; null: none
  void* output;       // [Dv]
  float* lse;         // null: not wanted
  float sink;         // -inf: none
  int32_t first;      // it sees the keys first <= j < last; 0 and 0: none
  int32_t last;
};

// Keys, or values, of one key head; elements.
struct KeyRows {
  void const* start;
  int64_t row_stride;   // from one to the next, in a page too
  int64_t page_stride;  // from page to page, where there are pages
};

// Where key j lies in a paged cache: row j % size of page table[j / size].
struct Pages {
  int32_t const* table;  // of one batch entry; null: keys and values lie in one piece
  int32_t size;          // keys a page
  int32_t count;  // pages that there are, at least 1; an entry that is none of them reads another's keys
};

// What the rows of one batch entry and one key head share.
struct RowProblem {
  int32_t dtype;       // FlashDtype of query, key, value, output
  int32_t bias_dtype;  // FlashDtype
  int32_t head_dim;
  int32_t v_head_dim;
  float scale;
  float softcap;  // 0: off
  KeyRows key;    // [Skv, D]
  KeyRows value;  // [Skv, Dv]
  Pages pages;
  int64_t bias_stride;  // elements from one key to the next; 0 or 1
};

// The kernels of one instruction set. Two ways: many rows at a time with the rows in a vector's lanes, and
// few rows with a head's dimensions in them.
struct Kernels {
  char const* name;
  int32_t strip_rows;  // rows that a tile best has a multiple of
  int32_t tile_rows;   // most rows of a tile
  int32_t slice_rows;  // up to so many rows, slices are faster than a tile

  // Finishes the rows: output and lse. `scratch` has tileScratch() floats and is 64-byte aligned.
  void (*tile)(RowProblem const& problem, Row const* rows, int32_t count, float* scratch);
  int64_t (*tileScratch)(RowProblem const& problem);

  // The part of the rows that the keys first <= j < last contribute: partialSize() floats a row.
  void (*slice)(RowProblem const& problem, Row const* rows, int32_t count, int32_t first, int32_t last,
                float* partials, float* scratch);
  int64_t (*sliceScratch)(RowProblem const& problem, int32_t count);
  int64_t (*partialSize)(RowProblem const& problem);

  // Finishes a row from its `slices` partials, which lie `step` floats apart. `scratch` has combineScratch()
  // floats.
  void (*combine)(RowProblem const& problem, Row const& row, float const* partials, int64_t step,
                  int32_t slices, float* scratch);
  int64_t (*combineScratch)(RowProblem const& problem);
};

Kernels const& plainKernels();   // the compiler's default instruction set
Kernels const& avx2Kernels();    // x86-64 with AVX2, FMA and F16C
Kernels const& avx512Kernels();  // x86-64 with AVX-512F, BW, DQ and VL

}  // namespace flash_export::cpu
