// SPDX-License-Identifier: Apache-2.0
// Writes new keys and values behind those that a cache holds, one warp a row. A row past the cache's
// capacity, or in a page that is none, is dropped: nothing outside the cache is touched whatever lengths and
// tables say.
#pragma once
#include "append_params.h"
#include "sequences.h"

namespace flash_export::kernels {

template <class Element_>
struct Append {
  using Element = Element_;
  static constexpr int kWarps = kAppendWarps;
  static constexpr int kThreads = kWarps * kWarpSize;

  static FLASH_DEVICE void run(AppendParams const& p) {
    int64_t const number = ops::blockIndex() * kWarps + ops::warp();
    if (number >= appendRows(p)) return;
    int const rows = larger(p.seqlen_new, 1);
    int64_t const batch_head = number / rows;
    int const row = int(number - batch_head * rows);
    int const batch = int(batch_head / p.heads);
    int const head = int(batch_head - int64_t(batch) * p.heads);

    Span const fresh = packedSpan(p.cu_seqlens_new, batch, p.total_new, p.seqlen_new);
    int const given = ops::loadGlobal(p.kv_lengths + int64_t(batch) * p.kv_lengths_stride);
    int const before = larger(0, smaller(given, p.capacity));
    if (p.lengths_after != nullptr && head == 0 && row == 0 && ops::lane() == 0) {
      ops::storeBits(p.lengths_after + batch, uint32_t(smaller(before + fresh.count, p.capacity)));
    }
    if (row >= fresh.count || before + row >= p.capacity) return;
    int64_t batch_or_page = batch;
    int cache_row = before + row;
    if (p.page_table != nullptr) {
      PagePlace const place = pagePlaceOf(cache_row, p.page_bits);
      int const page = ops::loadGlobal(p.page_table + int64_t(batch) * p.page_table_stride + place.entry);
      if (uint32_t(page) >= p.page_count) return;
      batch_or_page = page;
      cache_row = place.row;
    }
    copyRow(rowOf(p.key_cache, batch_or_page, head, cache_row),
            rowOf(p.key, batch, head, int64_t(fresh.first) + row), p.head_dim, p.vector_copies);
    copyRow(rowOf(p.value_cache, batch_or_page, head, cache_row),
            rowOf(p.value, batch, head, int64_t(fresh.first) + row), p.v_head_dim, p.vector_copies);
  }

 private:
  static FLASH_DEVICE Element* rowOf(FlashTensor const& tensor, int64_t batch, int head, int64_t row) {
    return static_cast<Element*>(tensor.data) + batch * tensor.batch_stride +
           int64_t(head) * tensor.head_stride + row * tensor.row_stride;
  }

  static FLASH_DEVICE void copyRow(Element* to, Element const* from, int head_dim, bool vector_copies) {
    constexpr int kElements = kChunkBytes / int(sizeof(Element));
    if (vector_copies) {
      for (int d = ops::lane() * kElements; d < head_dim; d += kWarpSize * kElements) {
        ops::storeGlobal128(to + d, ops::loadGlobal128(from + d));
      }
    } else {
      for (int d = ops::lane(); d < head_dim; d += kWarpSize) ops::storeBits(to + d, ops::loadBits(from + d));
    }
  }
};

}  // namespace flash_export::kernels
