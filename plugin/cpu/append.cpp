// SPDX-License-Identifier: Apache-2.0
#include "append.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/geometry.h"
#include "kernels/reasons.h"

namespace flash_export::cpu {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;  // bytes that a thread copies at a time

struct Copy {
  char* to;
  char const* from;
  int64_t bytes;
};

void copyChunk(void* user, size_t i) {
  Copy const& copy = *static_cast<Copy*>(user);
  int64_t const first = int64_t(i) * kChunk;
  std::memcpy(copy.to + first, copy.from + first, size_t(std::min(kChunk, copy.bytes - first)));
}

// The new rows of one batch entry and head, behind the `before` that the cache holds.
void appendRows(FlashAppendArgs const& args, FlashTensor const& cache, FlashTensor const& fresh,
                int32_t head_dim, int64_t batch, int64_t head, int64_t before) {
  int64_t const size = args.dtype == kFlashFloat32 ? 4 : 2;
  int64_t const rows = std::min(args.seqlen_new, args.capacity - before);
  for (int64_t i = 0; i < rows; ++i) {
    int64_t outer = batch, inner = before + i;
    if (args.page_table != nullptr) {
      outer = args.page_table[batch * args.page_table_stride + inner / args.page_size];
      inner %= args.page_size;
      if (outer < 0 || outer >= args.page_count) continue;
    }
    int64_t const from = batch * fresh.batch_stride + head * fresh.head_stride + i * fresh.row_stride;
    int64_t const to = outer * cache.batch_stride + head * cache.head_stride + inner * cache.row_stride;
    std::memcpy(static_cast<char*>(cache.data) + to * size,
                static_cast<char const*>(fresh.data) + from * size, size_t(head_dim * size));
  }
}

}  // namespace

void copyCache(void* to, void const* from, int64_t bytes, Parallel const& parallel) {
  if (to == from || bytes == 0) return;
  Copy copy{static_cast<char*>(to), static_cast<char const*>(from), bytes};
  parallel.run(parallel.host, copyChunk, size_t(kernels::ceilDiv(bytes, kChunk)), &copy);
}

void append(FlashAppendArgs const& args) {
  std::vector<int64_t> before(
      size_t(args.batch));  // all of them first, for lengths_after may be their memory
  for (int64_t batch = 0; batch < args.batch; ++batch) {
    before[size_t(batch)] =
        std::clamp<int64_t>(args.kv_lengths[batch * args.kv_lengths_stride], 0, args.capacity);
  }
  for (int64_t batch = 0; batch < args.batch; ++batch) {
    int64_t const held = before[size_t(batch)];
    for (int64_t head = 0; head < args.kv_num_heads; ++head) {
      appendRows(args, args.key_cache, args.key, args.head_dim, batch, head, held);
      appendRows(args, args.value_cache, args.value, args.v_head_dim, batch, head, held);
    }
    args.lengths_after[batch] = int32_t(std::min(held + args.seqlen_new, args.capacity));
  }
}

}  // namespace flash_export::cpu

extern "C" int32_t flashAttentionAppendWhyUnsupported(FlashAppendArgs const* args, char* text,
                                                      size_t text_size) {
  namespace kernels = flash_export::kernels;
  kernels::Reasons why;
  why.inRange("seqlen_new", args->seqlen_new, 0, kernels::kMaxSeqlen);
  why.inRange("capacity", args->capacity, 0, kernels::kMaxKeys);
  if (args->page_table != nullptr) why.pages(args->page_size);
  return kernels::joinReasons(why.sentences(), text, text_size);
}
