/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels without TensorRT: one step of decoding, 8 query heads that share 2 key-value heads, over 300 cached
 * keys of 512 allocated. Prints the log-sum-exp and the first numbers of each head.
 *
 * ../README.md, "Use without TensorRT", has the commands that build it.
 *
 * FLASH_ON_HOST: against the emulated kernels, with everything in host memory.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "device_memory.h"
#include "flash_attention.h"

enum { kHeadsQ = 8, kHeadsKv = 2, kHeadDim = 64, kAllocated = 512, kCached = 300 };

/* A tensor [heads, rows, kHeadDim] of fp32 on the device, filled by a rule. */
static FlashTensor tensor(int heads, int rows, float frequency) {
  size_t const count = (size_t)heads * (size_t)rows * kHeadDim;
  float* const numbers = malloc(count * sizeof(float));
  FlashTensor t = {allocate(count * sizeof(float)), (int64_t)count, (int64_t)rows * kHeadDim, kHeadDim};
  must(numbers == NULL ? 2 : 0, "allocate memory");
  for (size_t i = 0; i < count; ++i) numbers[i] = sinf(frequency * (float)(i % 9973));
  copy(t.data, numbers, count * sizeof(float));
  free(numbers);
  return t;
}

int main(void) {
  FlashAttentionArgs a = {0};
  a.dtype = kFlashFloat32;
  a.batch = 1;
  a.q_num_heads = kHeadsQ;
  a.kv_num_heads = kHeadsKv;
  a.head_dim = a.v_head_dim = kHeadDim;
  a.seqlen_q = 1;
  a.seqlen_kv = kAllocated;
  a.query = tensor(kHeadsQ, 1, 0.37f);
  a.key = tensor(kHeadsKv, kAllocated, 0.11f);
  a.value = tensor(kHeadsKv, kAllocated, 0.05f);
  a.output = tensor(kHeadsQ, 1, 0.0f);
  a.scale = 0.125f;
  a.causal = a.diagonal = 1; /* bottom-right: the query stands at the last cached key */
  a.window_left = a.window_right = -1;
  int32_t const cached = kCached;
  int32_t* const lengths = allocate(sizeof cached);
  a.lse = allocate(kHeadsQ * sizeof(float));
  copy(lengths, &cached, sizeof cached);
  a.kv_lengths = lengths;

  char why[512];
  if (flashAttentionWhyUnsupported(&a, why, sizeof why) != 0) {
    fprintf(stderr, "%s\n", why);
    return 1;
  }
  size_t const bytes = flashAttentionWorkspace(&a);
  void* const workspace = bytes > 0 ? allocate(bytes) : NULL;
  must(flashAttentionLaunch(&a, workspace, NULL), "launch the attention");
  float lse[kHeadsQ], output[kHeadsQ][kHeadDim]; /* the copies wait for the stream */
  copy(lse, a.lse, sizeof lse);
  copy(output, a.output.data, sizeof output);
  for (int h = 0; h < kHeadsQ; ++h) {
    printf("head %d: lse %.4f, output %.4f %.4f %.4f\n", h, lse[h], output[h][0], output[h][1], output[h][2]);
  }
  return 0;
}
