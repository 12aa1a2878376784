// SPDX-License-Identifier: Apache-2.0
// The door of the append kernel (flash_attention.h): what is refused, and the launch. Host code, the same for
// CUDA and for the emulation.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "launch.h"
#include "reasons.h"
#include "tensors.h"
#include "variants.h"

namespace flash_export::kernels {
namespace {

constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue

// Blocks read what lengths_after may not lie in, in any order beside its writing. The sizes are in range.
void lengthsApart(Reasons& why, FlashAppendArgs const& a) {
  auto const apart = [&](char const* name, Table const& table) {
    why.unless(!overlaps(table, a.lengths_after, a.batch), [=] {
      return std::string("lengths_after overlaps ") + name + "; the kernels need memory of its own for it.";
    });
  };
  apart("kv_lengths", {a.kv_lengths, a.batch, a.kv_lengths_stride, 1});
  apart("cu_seqlens_new", {a.cu_seqlens_new, 1, 0, int64_t(a.batch) + 1});
  if (a.page_table != nullptr) {
    apart("page_table", {a.page_table, a.batch, a.page_table_stride, ceilDiv(a.capacity, a.page_size)});
  }
}

Extent extentOfCache(FlashAppendArgs const& a) {
  if (a.page_table != nullptr) return {a.page_count, a.kv_num_heads, a.page_size};
  return {a.batch, a.kv_num_heads, a.capacity};
}

std::vector<std::string> whyUnsupported(FlashAppendArgs const& a) {
  Reasons why;
  why.inRange("dtype", a.dtype, kFlashFloat32, kFlashBFloat16);
  why.inRange("batch", a.batch, 0, INT32_MAX);
  why.inRange("kv_num_heads", a.kv_num_heads, 1, 65535);
  why.inRange("head_dim", a.head_dim, 1, kMaxHeadDim);
  why.inRange("v_head_dim", a.v_head_dim, 1, kMaxHeadDim);
  why.inRange("seqlen_new", a.seqlen_new, 0, kMaxSeqlen);
  why.inRange("capacity", a.capacity, 0, kMaxKeys);
  why.inRange("kv_lengths_stride", a.kv_lengths_stride, 0, 1);
  why.inRange("reserved", a.reserved, 0, 0);
  if (a.cu_seqlens_new != nullptr) why.inRange("total_new", a.total_new, 0, INT32_MAX);
  if (a.page_table != nullptr) {
    why.pages(a.page_size);
    why.inRange("page_count", a.page_count, 0, INT32_MAX);
  }
  int const bytes = bytesOf(a.dtype);
  why.aligned("key.data", a.key.data, bytes);
  why.aligned("value.data", a.value.data, bytes);
  why.aligned("key_cache.data", a.key_cache.data, bytes);
  why.aligned("value_cache.data", a.value_cache.data, bytes);
  why.aligned("kv_lengths", a.kv_lengths, 4);
  why.aligned("lengths_after", a.lengths_after, 4);
  why.aligned("cu_seqlens_new", a.cu_seqlens_new, 4);
  why.aligned("page_table", a.page_table, 4);
  if (!why.sentences().empty()) return why.sentences();
  lengthsApart(why, a);
  why.rowsApart("key_cache", a.key_cache, extentOfCache(a), a.head_dim);
  why.rowsApart("value_cache", a.value_cache, extentOfCache(a), a.v_head_dim);
  why.unless(a.key_cache.data == nullptr || a.key_cache.data != a.value_cache.data, [] {
    return std::string("key_cache and value_cache begin at one address; the kernels need memory for both.");
  });
  double const rows = double(a.batch) * a.kv_num_heads * double(std::max<int64_t>(a.seqlen_new, 1));
  why.blocks(std::ceil(rows / kAppendWarps), "batch " + std::to_string(a.batch) + ", " +
                                                 std::to_string(a.kv_num_heads) + " heads and " +
                                                 std::to_string(a.seqlen_new) + " rows");
  return why.sentences();
}

AppendParams resolve(FlashAppendArgs const& a) {
  AppendParams p{};
  bool const packed = a.cu_seqlens_new != nullptr, paged = a.page_table != nullptr;
  p.key = withBatches(a.key, packed);
  p.value = withBatches(a.value, packed);
  p.key_cache = a.key_cache;
  p.value_cache = a.value_cache;
  p.batch = a.batch;
  p.heads = a.kv_num_heads;
  p.head_dim = a.head_dim;
  p.v_head_dim = a.v_head_dim;
  p.seqlen_new = int(a.seqlen_new);
  p.capacity = int(a.capacity);
  Extent const fresh{packed ? 1 : a.batch, a.kv_num_heads, packed ? a.total_new : a.seqlen_new};
  Extent const cache = extentOfCache(a);
  p.vector_copies = copiesVectors(a.key, a.dtype, fresh, a.head_dim) &&
                    copiesVectors(a.value, a.dtype, fresh, a.v_head_dim) &&
                    copiesVectors(a.key_cache, a.dtype, cache, a.head_dim) &&
                    copiesVectors(a.value_cache, a.dtype, cache, a.v_head_dim);
  p.kv_lengths = a.kv_lengths;
  p.kv_lengths_stride = a.kv_lengths_stride;
  p.lengths_after = a.lengths_after;
  p.cu_seqlens_new = a.cu_seqlens_new;
  p.total_new = packed ? int(a.total_new) : 0;
  p.page_table = a.page_table;
  p.page_table_stride = a.page_table_stride;
  p.page_bits = paged ? bitsOfPage(a.page_size) : 0;
  p.page_count = uint32_t(a.page_count);
  return p;
}

bool lacksPointers(FlashAppendArgs const& a) {
  bool const rows = a.seqlen_new > 0 && (a.cu_seqlens_new == nullptr || a.total_new > 0);
  bool const room = a.capacity > 0 && (a.page_table == nullptr || a.page_count > 0);
  return a.kv_lengths == nullptr || (rows && (a.key.data == nullptr || a.value.data == nullptr)) ||
         (rows && room && (a.key_cache.data == nullptr || a.value_cache.data == nullptr));
}

}  // namespace
}  // namespace flash_export::kernels

using namespace flash_export::kernels;

int32_t flashAttentionAppendWhyUnsupported(FlashAppendArgs const* args, char* text, size_t text_size) {
  return joinReasons(whyUnsupported(*args), text, text_size);
}

int32_t flashAttentionAppend(FlashAppendArgs const* args, void* stream) {
  if (!whyUnsupported(*args).empty()) return kInvalidValue;
  if (args->batch == 0) return 0;
  if (lacksPointers(*args)) return kInvalidValue;
  return launchAppend(args->dtype, resolve(*args), stream);
}
