/* SPDX-License-Identifier: Apache-2.0
 *
 * A cache in pages that grows in place, in fp16: a prompt of 100 tokens and three steps of decoding, 8 query heads over 2
 * key-value heads. Each step appends its keys and values and attends to all so far; the same is done with a contiguous
 * cache. Prints whether every step's bits are the same.
 *
 * Build it as decode.c.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_memory.h"
#include "flash_attention.h"

enum { kHeadsQ = 8, kHeadsKv = 2, kHeadDim = 64, kPrompt = 100, kCapacity = 128, kPageSize = 32, kPages = 7 };

/* For |x| below 65504; what is too small for a normal number becomes 0. */
static uint16_t half_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  int const exponent = (int)(bits >> 23 & 255) - 127 + 15;
  if (exponent <= 0) return 0;
  return (uint16_t)((bits >> 16 & 0x8000) | ((uint32_t)exponent << 10) | (bits >> 13 & 1023));
}

static void* device_copy(void const* from, size_t bytes) {
  void* const p = allocate(bytes);
  copy(p, from, bytes);
  return p;
}

/* [1, rows, heads, kHeadDim], filled by a rule; a frequency of 0 gives NaN: memory that nobody has written yet. */
static FlashTensor tensor(int outer, int rows, int heads, float frequency) {
  int64_t const step = (int64_t)heads * kHeadDim, count = outer * rows * step;
  uint16_t* const numbers = malloc((size_t)count * sizeof(uint16_t));
  must(numbers == NULL ? 2 : 0, "allocate memory");
  for (int64_t i = 0; i < count; ++i) {
    numbers[i] = frequency == 0.0f ? 0x7fff : half_of(sinf(frequency * (float)(i % 9973)));
  }
  FlashTensor const t = {device_copy(numbers, (size_t)count * sizeof(uint16_t)), rows * step, kHeadDim, step};
  free(numbers);
  return t;
}

/* Appends `rows` new keys and attends with as many queries; the outputs' bits go to `output`. */
static void step(FlashAppendArgs append, FlashAttentionArgs attention, int rows, void* workspace, uint16_t* output) {
  append.key = tensor(1, rows, kHeadsKv, 0.11f + 0.01f * (float)rows);
  append.value = tensor(1, rows, kHeadsKv, 0.05f);
  append.seqlen_new = attention.seqlen_q = rows;
  attention.query = tensor(1, rows, kHeadsQ, 0.37f);
  attention.output = tensor(1, rows, kHeadsQ, 0.0f);
  must(flashAttentionAppend(&append, NULL), "append to the cache");
  must(flashAttentionLaunch(&attention, workspace, NULL), "launch the attention");
  copy(output, attention.output.data, (size_t)rows * kHeadsQ * kHeadDim * sizeof(uint16_t));
}

int main(void) {
  int32_t const table[kCapacity / kPageSize] = {5, 0, 6, 2}, zero = 0;
  FlashAppendArgs append = {0};
  append.dtype = kFlashFloat16;
  append.batch = 1;
  append.kv_num_heads = kHeadsKv;
  append.head_dim = append.v_head_dim = kHeadDim;
  append.capacity = kCapacity;
  append.key_cache = tensor(1, kCapacity, kHeadsKv, 0.0f);
  append.value_cache = tensor(1, kCapacity, kHeadsKv, 0.0f);
  FlashAppendArgs paged = append;
  paged.key_cache = tensor(kPages, kPageSize, kHeadsKv, 0.0f);
  paged.value_cache = tensor(kPages, kPageSize, kHeadsKv, 0.0f);
  paged.page_table = device_copy(table, sizeof table);
  paged.page_table_stride = kCapacity / kPageSize;
  paged.page_size = kPageSize;
  paged.page_count = kPages;
  /* The lengths take turns: each step reads one and writes the next. */
  int32_t* lengths[2] = {device_copy(&zero, sizeof zero), device_copy(&zero, sizeof zero)};

  FlashAttentionArgs a = {0};
  a.dtype = kFlashFloat16;
  a.batch = 1;
  a.q_num_heads = kHeadsQ;
  a.kv_num_heads = kHeadsKv;
  a.head_dim = a.v_head_dim = kHeadDim;
  a.seqlen_q = kPrompt; /* the most rows of a step: memory for them serves fewer */
  a.seqlen_kv = kCapacity;
  a.scale = 0.125f;
  a.causal = a.diagonal = 1; /* bottom-right: the last query stands at the last cached key */
  a.window_left = a.window_right = -1;
  void* const workspace = allocate(flashAttentionWorkspace(&a));

  static uint16_t contiguous_bits[kPrompt * kHeadsQ * kHeadDim], paged_bits[kPrompt * kHeadsQ * kHeadDim];
  int const rows[] = {kPrompt, 1, 1, 1};
  for (int i = 0; i < 4; ++i) {
    append.kv_lengths = paged.kv_lengths = lengths[i % 2];
    append.lengths_after = paged.lengths_after = lengths[(i + 1) % 2];
    a.kv_lengths = append.lengths_after;
    a.key = append.key_cache;
    a.value = append.value_cache;
    step(append, a, rows[i], workspace, contiguous_bits);
    FlashAttentionArgs in_pages = a;
    in_pages.key = paged.key_cache;
    in_pages.value = paged.value_cache;
    in_pages.page_table = paged.page_table;
    in_pages.page_table_stride = paged.page_table_stride;
    in_pages.page_size = kPageSize;
    in_pages.page_count = kPages;
    step(paged, in_pages, rows[i], workspace, paged_bits);
    size_t const count = (size_t)rows[i] * kHeadsQ * kHeadDim;
    int nan = 0;
    for (size_t n = 0; n < count; ++n) nan |= (paged_bits[n] & 0x7fff) > 0x7c00;
    int const same = memcmp(contiguous_bits, paged_bits, count * sizeof(uint16_t)) == 0 && !nan;
    printf("%d new, paged %s contiguous\n", rows[i], same ? "equals" : "DIFFERS FROM");
    if (!same) return 1;
  }
  int32_t length = -1;
  copy(&length, lengths[0], sizeof length);
  printf("the cache holds %d keys\n", length);
  return length == kPrompt + 3 ? 0 : 1;
}
