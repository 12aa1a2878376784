// SPDX-License-Identifier: Apache-2.0
// What a forward kernel is given: the arguments of the door (flash_attention.h), resolved on the host to what
// the device needs. Passed by value as the kernel's only parameter.
#pragma once
#include "flash_attention.h"
#include "geometry.h"

namespace flash_export::kernels {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

// How far a row's scores may pass the maximum that its weights are taken against, in factors of two of a
// weight: weights stay below 256, where fp16 and bf16 have their full precision and sums in fp32 have room.
constexpr float kLazyGrowth = 8.0f;

// The largest scale * log2 e that FoldedSoftmax serves. Above it a product of queries and keys of 64 would
// already make a row steep, which takes longer every tile; the other policies have no such rows.
constexpr float kMaxFoldedScale = 1024.0f;

struct ForwardParams {
  FlashTensor query, key, value, output;
  int batch, q_heads, kv_heads, group;  // group = q_heads / kv_heads query heads share one key-value head
  int head_dim, v_head_dim;
  int seqlen_q, seqlen_kv;
  bool vector_copies;  // every row starts and ends on 16 bytes: copies of 16 bytes; else element by element
  int causal, diagonal, window_left, window_right;
  float scale;        // multiplier of Q.K^T
  float scale_log2;   // scale * log2(e)
  float lazy_growth;  // kLazyGrowth in units of Q.K^T; infinite where no finite score gets so far
  float softcap;      // 0 off
  void const* bias;   // [B, Hq, Sq, Skv] by strides; null: none
  bool bias_is_float;
  int64_t bias_stride[4];
  int32_t const* kv_lengths;  // null: seqlen_kv everywhere
  int64_t kv_lengths_stride;
  float const* sinks;  // null: none
  int64_t sinks_stride;
  float* lse;                    // [B, Hq, Sq], or [Hq, total_q] of packed sequences; null: not wanted
  int32_t const* cu_seqlens_q;   // null: seqlen_q everywhere
  int32_t const* cu_seqlens_kv;  // null: seqlen_kv everywhere
  int total_q, total_kv;         // rows of packed sequences
  int32_t const* page_table;     // null: keys are not paged
  int64_t page_table_stride;
  int page_bits;  // a page has 2^page_bits keys
  uint32_t last_page;
  int page_count;  // the caller's, by which the emulation knows where the pool ends; last_page is made of it
  int pack;        // query heads in the rows of one tile: 1 or `group` (geometry.h, placeOf)
  int splits;      // blocks that share the keys of a tile of rows; above 1 they write the next three instead
  float* partial_output;  // [splits, B, Hq, Sq, Dv]
  float* partial_max;     // [splits, B, Hq, Sq]: what weights were taken against, a natural score
  float* partial_sum;     // [splits, B, Hq, Sq]: of the weights, without the sink
};

// Rows of all heads of all batches, as the lse numbers them.
FLASH_HOST_DEVICE constexpr int64_t rowCount(int64_t batch, int64_t q_heads, int64_t seqlen_q) {
  return batch * q_heads * seqlen_q;
}

// Blocks of the one-dimensional grid: one for each tile of (packed) query rows of each head of each batch.
FLASH_HOST_DEVICE constexpr int64_t blockCount(int64_t batch, int64_t q_heads, int64_t seqlen_q, int tile_q,
                                               int pack) {
  return batch * (q_heads / pack) * ceilDiv(seqlen_q * pack, tile_q);
}

}  // namespace flash_export::kernels
