// SPDX-License-Identifier: Apache-2.0
// What the host asks of a tensor before a launch.
#pragma once
#include <algorithm>
#include <cstdint>

#include "geometry.h"

namespace flash_export::kernels {

constexpr int bytesOf(int32_t dtype) { return dtype == kFlashFloat32 ? 4 : 2; }

// How far the strides of a tensor reach: the axes' sizes.
struct Extent {
  int64_t batches, heads, rows;
};

// The stride that puts two rows of `columns` elements onto one another; null where none does by itself.
inline char const* overlappingStride(FlashTensor const& t, Extent extent, int64_t columns) {
  auto const overlaps = [=](int64_t size, int64_t stride) {
    return size > 1 && stride > -columns && stride < columns;
  };
  if (extent.batches <= 0 || extent.heads <= 0 || extent.rows <= 0) return nullptr;
  if (overlaps(extent.rows, t.row_stride)) return "row_stride";
  if (overlaps(extent.heads, t.head_stride)) return "head_stride";
  return overlaps(extent.batches, t.batch_stride) ? "batch_stride" : nullptr;
}

// Whether every row of a tensor starts and ends on 16 bytes. The stride of an axis of one step is never used.
inline bool copiesVectors(FlashTensor const& t, int32_t dtype, Extent extent, int64_t head_dim) {
  int64_t const chunk = kChunkBytes / bytesOf(dtype);
  return reinterpret_cast<uintptr_t>(t.data) % kChunkBytes == 0 && head_dim % chunk == 0 &&
         (extent.batches <= 1 || t.batch_stride % chunk == 0) &&
         (extent.heads <= 1 || t.head_stride % chunk == 0) && (extent.rows <= 1 || t.row_stride % chunk == 0);
}

inline int bitsOfPage(int page_size) {
  int bits = 0;
  while ((1 << bits) < page_size) ++bits;
  return bits;
}

// Whether one of `count` multiples of `step`, 0 the first, lies between `low` and `high`, both exclusive.
inline bool hasMultiple(int64_t count, int64_t step, int64_t low, int64_t high) {
  if (step < 0) return hasMultiple(count, -step, -high, -low);
  int64_t const first = low < 0 ? 0 : (step == 0 ? count : low / step + 1);
  return first < count && first * step < high;
}

// `count` rows of `width` numbers each.
struct Table {
  int32_t const* data;
  int64_t count, stride, width;
};

// Whether a table, if it is there, has a number among the `count` from `numbers` on.
inline bool overlaps(Table const& table, int32_t const* numbers, int64_t count) {
  if (table.data == nullptr || numbers == nullptr) return false;
  constexpr int64_t kFarthest = int64_t{1} << 61;  // no address is so many numbers away
  int64_t const stride = std::clamp(table.stride, -kFarthest, kFarthest);
  // Addresses as numbers: the two need not be of one array.
  auto const bytes = int64_t(reinterpret_cast<uintptr_t>(numbers) - reinterpret_cast<uintptr_t>(table.data));
  int64_t const away = bytes / int64_t(sizeof(int32_t));
  return hasMultiple(table.count, stride, away - table.width, away + count);
}

// The step to the next batch is never taken in packed sequences: all are one tensor.
inline FlashTensor withBatches(FlashTensor t, bool packed) {
  if (packed) t.batch_stride = 0;
  return t;
}

}  // namespace flash_export::kernels
