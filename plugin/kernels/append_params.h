// SPDX-License-Identifier: Apache-2.0
// What the append kernel is given: the arguments of the door (flash_attention.h), resolved on the host.
#pragma once
#include "flash_attention.h"
#include "geometry.h"

namespace flash_export::kernels {

constexpr int kAppendWarps = 4;  // of a block; each takes a row

struct AppendParams {
  FlashTensor key, value, key_cache, value_cache;
  int batch, heads, head_dim, v_head_dim;
  int seqlen_new, capacity;
  bool vector_copies;  // every row starts and ends on 16 bytes
  int32_t const* kv_lengths;
  int64_t kv_lengths_stride;
  int32_t* lengths_after;         // null: not wanted
  int32_t const* cu_seqlens_new;  // null: seqlen_new everywhere
  int total_new;
  int32_t const* page_table;  // null: the cache is not paged
  int64_t page_table_stride;
  int page_bits;
  uint32_t page_count;
};

// Rows that the grid goes through: of a batch without new keys one, which writes its length.
FLASH_HOST_DEVICE constexpr int64_t appendRows(AppendParams const& p) {
  return int64_t(p.batch) * p.heads * larger(p.seqlen_new, 1);
}

}  // namespace flash_export::kernels
