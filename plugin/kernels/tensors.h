// SPDX-License-Identifier: Apache-2.0
// What the host asks of a tensor before a launch.
#pragma once
#include <cstdint>

#include "geometry.h"

namespace flash_export::kernels {

constexpr int bytesOf(int32_t dtype) { return dtype == kFlashFloat32 ? 4 : 2; }

// How far the strides of a tensor reach: the axes' sizes.
struct Extent {
  int64_t batches, heads, rows;
};

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

// The step to the next batch is never taken in packed sequences: all are one tensor.
inline FlashTensor withBatches(FlashTensor t, bool packed) {
  if (packed) t.batch_stride = 0;
  return t;
}

}  // namespace flash_export::kernels
