// SPDX-License-Identifier: Apache-2.0
// The only door into the kernels' room: raw pointers and integers, no TensorRT header, no ONNX.
//
//   output = softmax(mask(softcap(scale * Q.K^T) + bias)) . V, exact, accumulated in fp32
//
// Every tensor is described by a pointer and 64-bit strides in elements; the last axis (D) is contiguous. So
// one kernel serves [B, S, H*D], [B, H, S, D] and a packed [B, S, (Hq + 2*Hkv)*D]. A stride may be 0, of an
// axis along which an input repeats, or negative (but see page_table). Rows that are written overlap neither
// one another, which is refused where one stride alone makes them, nor any input.
//
// An address is a multiple of its elements' size, the workspace's of 4. Where every row of query, key, value
// and output starts and ends on 16 bytes (addresses, strides and head dims alike), the faster kernels serve
// the problem.
//
// Limits, beyond which a problem is refused with the number that passes one:
//   head_dim, v_head_dim                         1 ... 256, each for itself
//   q_num_heads, kv_num_heads                    1 ... 65535; q_num_heads is a multiple of kv_num_heads
//   seqlen_q, seqlen_new                         0 ... 2^28
//   seqlen_kv, capacity                          0 ... 2^24: a sum in fp32 counts no further
//   total_q, total_kv, total_new, page_count     0 ... 2^31 - 1; page_count 1 at least where there are keys
//   scale                                        finite
//   softcap                                      0 or positive, finite
//   rows                                         batch * q_num_heads * ceil(seqlen_q / 32) below 2^31; of an
//                                                append batch * kv_num_heads * seqlen_new up to 2^33 - 4
//
// Limits of the numbers, which no call can see: every sum is one of fp32, which ends at 3.4e38.
//   Q.K^T                                        before the scale multiplies it: a scale far below 1 saves no
//                                                product of a query and a key that is past that
//   V                                            |V| * keys * 256, which only fp32 and bf16 can bring past
//                                                that: weights are up to 2^8, and their sum divides the
//                                                output only where a row ends
//
// Two forms go beyond the operator's nodes. Packed sequences of different lengths lie one behind the other
// along the rows (cu_seqlens_q, cu_seqlens_kv). In a paged cache keys and values lie in pages anywhere in a
// pool, found by a table (page_table). They combine with everything else, but cu_seqlens_kv not with
// page_table.
//
// Plain C, for use without TensorRT too: README.md says how to build and install the library,
// example/decode.c and example/paged.c use it.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum FlashDtype { kFlashFloat32 = 0, kFlashFloat16 = 1, kFlashBFloat16 = 2 } FlashDtype;

typedef struct FlashTensor FlashTensor;
struct FlashTensor {
  void* data;            // first element
  int64_t batch_stride;  // elements from one batch to the next
  int64_t head_stride;
  int64_t row_stride;  // along the sequence
};

// Plain C layout: tests mirror it with ctypes. Fields are the operator's (docs/op.md) with shapes resolved.
// A zeroed struct asks for: a scale of 0 (the mean of V), a window of the diagonal's key alone, an fp32 bias,
// kv_lengths and sinks of one number for all.
typedef struct FlashAttentionArgs FlashAttentionArgs;
struct FlashAttentionArgs {
  int32_t dtype;  // FlashDtype of query, key, value, output
  int32_t batch, q_num_heads, kv_num_heads;
  int32_t head_dim, v_head_dim;
  int64_t seqlen_q, seqlen_kv;
  FlashTensor query, key, value, output;
  float scale;       // multiplier of Q.K^T
  float softcap;     // c: scaled scores become c * tanh(score / c); 0 off
  int32_t causal;    // 0, 1
  int32_t diagonal;  // 0 top-left, 1 bottom-right: the last query stands at the last key that there is, by
                     // kv_lengths and cu_seqlens
  // Keys that a row sees beside its diagonal, causal or not. -1 is off; 0 means none beside it.
  int32_t window_left, window_right;
  // Side inputs; a null pointer means "not there".
  void const* bias;           // broadcastable to [B, Hq, Sq, Skv]; a broadcast axis has stride 0
  int32_t bias_dtype;         // FlashDtype: that of query, or fp32
  int32_t reserved;           // 0
  int64_t bias_stride[4];     // elements; [B, Hq, Sq, Skv]
  int32_t const* kv_lengths;  // [B] or [1], clamped to 0..seqlen_kv, and to its sequence of cu_seqlens_kv
  int64_t kv_lengths_stride;  // 1 or 0; not read without kv_lengths
  // [Hq] or [1]: one more score a row, without a value, as it is: neither scaled nor capped. -inf is none;
  // +inf takes all the weight (output 0, lse +inf); NaN shows in output and lse. A row that sees no key gives
  // 0 and the sink as its lse, whatever it is.
  float const* sinks;
  int64_t sinks_stride;  // 1 or 0; not read without sinks
  float* lse;            // [B, Hq, Sq] contiguous, natural log; null: not wanted
  // Packed sequences; null: not packed. Sequence b has the rows cu_seqlens[b] ... cu_seqlens[b + 1] - 1 of
  // tensors [total, H, D], none or at most seqlen_q (seqlen_kv); their batch_stride is not read. With
  // cu_seqlens_q the lse is [Hq, total_q]. Rows and keys count from their sequence's first, for masks and
  // bias too. Numbers that are out of order or past the total give wrong results but touch nothing outside.
  int32_t const* cu_seqlens_q;   // [B + 1], of query and output
  int32_t const* cu_seqlens_kv;  // [B + 1], of key and value
  int64_t total_q, total_kv;     // rows of those tensors; not read without cu_seqlens
  // A paged cache; null: not paged. Key j of batch b is row j % page_size of page page_table[b][j /
  // page_size], and batch_stride of key and value is the step from page to page. kv_lengths says how many
  // keys there are, all seqlen_kv without it; entries and rows past them are never read. An entry outside 0
  // ... page_count - 1 gives wrong results but touches nothing outside. The steps from page to page and row
  // to row are 0 ... 2^30 - 1 elements.
  int32_t const* page_table;  // [B, ceil(seqlen_kv / page_size)]
  int64_t page_table_stride;  // elements from one batch to the next
  int32_t page_size;          // keys a page: 16, 32, 64, 128 or 256
  int32_t page_count;         // pages that key and value have
};

// Why this problem cannot run, one sentence a reason, separated by '\n', into text (always NUL-terminated).
// Returns the number of reasons; 0: it runs. Host only, touches no pointer, needs no GPU. Pointers may still
// be null, as where a problem is judged before its memory is there, so a null query, key, value or output is
// no reason here, though a launch refuses it.
int32_t flashAttentionWhyUnsupported(FlashAttentionArgs const* args, char* text, size_t text_size);

// A problem with more queries than this has work for the whole device and never uses a workspace; it may be
// null.
enum { kFlashMaxSplitQueries = 16 };

// Bytes of device memory, aligned to 4, that flashAttentionLaunch may use at `workspace` for this problem or
// a smaller one; 0 when none. So it is never smaller for a larger problem: memory for the largest shapes of a
// range serves every problem in it, even where the kernels do not run the largest itself. A few MiB at most.
size_t flashAttentionWorkspace(FlashAttentionArgs const* args);

// Enqueues the forward on `stream` (a cudaStream_t). Never synchronises, never allocates; works in graph
// capture. Returns a cudaError_t: 0, enqueued; 1 (cudaErrorInvalidValue), nothing was enqueued, as
// flashAttentionWhyUnsupported has a reason, query, key, value or output is null though it has elements, or
// the workspace is no address of floats; else what the CUDA runtime says, 35 (cudaErrorInsufficientDriver)
// where there is no driver. A problem without rows (batch, seqlen_q or total_q of 0) returns 0 without
// touching a pointer; without keys (seqlen_kv or total_kv of 0) the output is zeros, and key and value may be
// null. Without a workspace (null) few queries over many keys, as in decoding, are not split over the whole
// device; the result is the same within rounding. The emulated build has the same symbol: pointers are host
// pointers, `stream` is ignored, and a fault that the emulation finds (race, missing wait, out of bounds,
// deadlock) makes it return 719 (launch failure), with its text in flashEmulationError()
// (char const* flashEmulationError(void), of the host thread's last launch that was not refused).
int32_t flashAttentionLaunch(FlashAttentionArgs const* args, void* workspace, void* stream);

// New keys and values that go into a cache behind those that it holds: row i of batch b becomes key
// kv_lengths[b] + i.
typedef struct FlashAppendArgs FlashAppendArgs;
struct FlashAppendArgs {
  int32_t dtype;  // FlashDtype of all four tensors
  int32_t batch, kv_num_heads, head_dim, v_head_dim;
  int32_t page_size, page_count;       // of a paged cache, as in FlashAttentionArgs
  int32_t reserved;                    // 0
  int64_t seqlen_new;                  // rows of key and value; of packed ones the most that a batch has
  int64_t capacity;                    // keys that the cache has room for, a batch
  FlashTensor key, value;              // new
  FlashTensor key_cache, value_cache;  // written; batch_stride: from page to page of a paged cache
  int32_t const* kv_lengths;           // [B] or [1], keys in the cache before; clamped to 0 ... capacity
  int64_t kv_lengths_stride;           // 1 or 0
  // [B], what kv_lengths is then, capacity at most; null: not wanted. It overlaps none of kv_lengths,
  // cu_seqlens_new and page_table, which blocks read in any order beside it; one that does is refused.
  int32_t* lengths_after;
  int32_t const* cu_seqlens_new;  // [B + 1], packed new rows; null: not packed
  int64_t total_new;              // rows of packed key and value
  int32_t const* page_table;      // [B, ceil(capacity / page_size)]; null: not paged
  int64_t page_table_stride;
};

// As flashAttentionWhyUnsupported.
int32_t flashAttentionAppendWhyUnsupported(FlashAppendArgs const* args, char* text, size_t text_size);

// Enqueues the copies; returns what flashAttentionLaunch does, 1 also where kv_lengths is null. A row that
// has no room, past the capacity or in a page outside 0 ... page_count - 1, is dropped: nothing outside the
// cache is touched, whatever the lengths and tables hold. lengths_after counts rows that lack a page.
int32_t flashAttentionAppend(FlashAppendArgs const* args, void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif
