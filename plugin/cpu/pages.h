// SPDX-License-Identifier: Apache-2.0
// Where keys and values lie: in one piece, or in pages.
#pragma once
#include "rows.h"
#include "simd.h"

namespace flash_export::cpu {
namespace {

template <class Element>
FLASH_INLINE Element const* rowAt(Pages const& pages, KeyRows const& rows, int key) {
  Element const* const start = static_cast<Element const*>(rows.start);
  if (pages.table == nullptr) return start + key * rows.row_stride;
  uint32_t const entry = uint32_t(pages.table[key / pages.size]);
  int64_t const page = entry < uint32_t(pages.count) ? entry : 0;
  return start + page * rows.page_stride + key % pages.size * rows.row_stride;
}

// One past the last of the keys key <= j < last that lie in one piece with the first.
FLASH_INLINE int endOfPiece(Pages const& pages, int key, int last) {
  if (pages.table == nullptr) return last;
  return smallerOf(last, key - key % pages.size + pages.size);
}

}  // namespace
}  // namespace flash_export::cpu
