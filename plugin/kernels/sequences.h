// SPDX-License-Identifier: Apache-2.0
// Which rows of the tensors a batch entry has: all alike, packed sequences of their own lengths, or a cache
// that is filled so far.
#pragma once
#include "device_ops.h"
#include "forward_params.h"

namespace flash_export::kernels {

FLASH_DEVICE Span packedSpan(int32_t const* cu_seqlens, int batch, int total, int longest) {
  if (cu_seqlens == nullptr) return {0, longest};
  return spanOf(ops::loadGlobal(cu_seqlens + batch), ops::loadGlobal(cu_seqlens + batch + 1), total, longest);
}

FLASH_DEVICE Span queriesOf(ForwardParams const& p, int batch) {
  return packedSpan(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
}

// As far as kv_lengths lets them count.
FLASH_DEVICE Span keysOf(ForwardParams const& p, int batch) {
  Span keys = packedSpan(p.cu_seqlens_kv, batch, p.total_kv, p.seqlen_kv);
  if (p.kv_lengths != nullptr) {
    int const given = ops::loadGlobal(p.kv_lengths + int64_t(batch) * p.kv_lengths_stride);
    keys.count = larger(0, smaller(given, keys.count));
  }
  return keys;
}

// A query's number among all rows of all heads and batches, as the partial results of splits have it.
FLASH_DEVICE int64_t rowNumber(ForwardParams const& p, int batch, int head, int query) {
  return (int64_t(batch) * p.q_heads + head) * p.seqlen_q + query;
}

// The same as the lse has it, `first_row` being its sequence's in packed ones.
FLASH_DEVICE int64_t lseNumber(ForwardParams const& p, int batch, int first_row, int head, int query) {
  if (p.cu_seqlens_q == nullptr) return rowNumber(p, batch, head, query);
  return int64_t(head) * p.total_q + first_row + query;
}

}  // namespace flash_export::kernels
