// SPDX-License-Identifier: Apache-2.0
// The door's three functions (flash_attention.h): what is refused, and which compiled kernel serves a
// problem. Host code, the same for CUDA and for the emulation.
#include "dispatch.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "forward_params.h"
#include "launch.h"

namespace flash_export::kernels {

#define FLASH_VARIANT(Element, head_dim, tile_q, tile_kv, warps, features) \
  int FLASH_LAUNCHER(Element, head_dim, features)(ForwardParams const&, int64_t, void*);
#include "variants.inc"
#undef FLASH_VARIANT

namespace {

constexpr int kInvalidValue = 1;                        // cudaErrorInvalidValue
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;  // of a CUDA grid's first axis

// In the order of variants.inc, as kVariants is.
Launcher const kLaunchers[] = {
#define FLASH_VARIANT(Element, head_dim, tile_q, tile_kv, warps, features) \
  FLASH_LAUNCHER(Element, head_dim, features),
#include "variants.inc"
#undef FLASH_VARIANT
};

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

// Takes sentences; each names what it got and what it needs. A sentence is made only where it is needed, as
// every launch asks.
class Reasons {
 public:
  template <class MakeSentence>
  void unless(bool good, MakeSentence sentence) {
    if (!good) mSentences.push_back(sentence());
  }
  void inRange(char const* name, int64_t value, int64_t low, int64_t high) {
    unless(value >= low && value <= high, [=] {
      return std::string(name) + " is " + std::to_string(value) + "; the kernels take " +
             std::to_string(low) + " to " + std::to_string(high) + ".";
    });
  }
  std::vector<std::string> const& sentences() const { return mSentences; }

 private:
  std::vector<std::string> mSentences;
};

std::vector<std::string> whyUnsupported(FlashAttentionArgs const& a) {
  Reasons why;
  why.inRange("dtype", a.dtype, kFlashFloat32, kFlashBFloat16);
  why.inRange("batch", a.batch, 0, INT32_MAX);
  why.inRange("q_num_heads", a.q_num_heads, 1, 65535);
  why.inRange("kv_num_heads", a.kv_num_heads, 1, 65535);
  why.unless(a.kv_num_heads < 1 || a.q_num_heads % a.kv_num_heads == 0, [&] {
    return "q_num_heads " + std::to_string(a.q_num_heads) + " is no multiple of kv_num_heads " +
           std::to_string(a.kv_num_heads) + ".";
  });
  why.inRange("head_dim", a.head_dim, 1, kMaxHeadDim);
  why.inRange("v_head_dim", a.v_head_dim, 1, kMaxHeadDim);
  why.inRange("seqlen_q", a.seqlen_q, 0, kMaxSeqlen);
  why.inRange("seqlen_kv", a.seqlen_kv, 0, kMaxSeqlen);
  why.unless(std::isfinite(a.scale),
             [&] { return "scale is " + number(a.scale) + "; the kernels take finite numbers."; });
  why.unless(std::isfinite(a.softcap) && a.softcap >= 0.0f, [&] {
    return "softcap is " + number(a.softcap) + "; the kernels take 0 (off) and positive finite numbers.";
  });
  why.inRange("causal", a.causal, 0, 1);
  why.inRange("diagonal", a.diagonal, 0, 1);
  why.inRange("window_left", a.window_left, -1, INT32_MAX);
  why.inRange("window_right", a.window_right, -1, INT32_MAX);
  why.unless(a.bias == nullptr || a.bias_dtype == a.dtype || a.bias_dtype == kFlashFloat32, [&] {
    return "bias has dtype " + std::to_string(a.bias_dtype) + " beside a query of dtype " +
           std::to_string(a.dtype) + "; the kernels take the query's or fp32.";
  });
  why.unless(a.reserved == 0,
             [&] { return "reserved is " + std::to_string(a.reserved) + "; it must be 0."; });
  why.inRange("kv_lengths_stride", a.kv_lengths_stride, 0, 1);
  why.inRange("sinks_stride", a.sinks_stride, 0, 1);
  if (!why.sentences().empty()) return why.sentences();
  int64_t const blocks = blockCount(a.batch, a.q_num_heads, a.seqlen_q, kSmallestTileQ, 1);
  why.unless(blocks <= kMaxBlocks, [&] {
    return "batch " + std::to_string(a.batch) + ", " + std::to_string(a.q_num_heads) + " heads and " +
           std::to_string(a.seqlen_q) + " rows make " + std::to_string(blocks) + " tiles; a grid takes " +
           std::to_string(kMaxBlocks) + ".";
  });
  return why.sentences();
}

// Whether every row of a tensor starts and ends on 16 bytes. The stride of an axis of one step is never used.
bool copiesVectors(FlashTensor const& t, FlashAttentionArgs const& a, int64_t heads, int64_t rows,
                   int64_t head_dim) {
  int64_t const chunk = kChunkBytes / (a.dtype == kFlashFloat32 ? 4 : 2);
  return reinterpret_cast<uintptr_t>(t.data) % kChunkBytes == 0 && head_dim % chunk == 0 &&
         (a.batch <= 1 || t.batch_stride % chunk == 0) && (heads <= 1 || t.head_stride % chunk == 0) &&
         (rows <= 1 || t.row_stride % chunk == 0);
}

ForwardParams resolve(FlashAttentionArgs const& a) {
  ForwardParams p{};
  p.query = a.query;
  p.key = a.key;
  p.value = a.value;
  p.output = a.output;
  p.batch = a.batch;
  p.q_heads = a.q_num_heads;
  p.kv_heads = a.kv_num_heads;
  p.group = a.q_num_heads / a.kv_num_heads;
  p.head_dim = a.head_dim;
  p.v_head_dim = a.v_head_dim;
  p.seqlen_q = int(a.seqlen_q);
  p.seqlen_kv = int(a.seqlen_kv);
  p.vector_copies = copiesVectors(a.query, a, a.q_num_heads, a.seqlen_q, a.head_dim) &&
                    copiesVectors(a.key, a, a.kv_num_heads, a.seqlen_kv, a.head_dim) &&
                    copiesVectors(a.value, a, a.kv_num_heads, a.seqlen_kv, a.v_head_dim) &&
                    copiesVectors(a.output, a, a.q_num_heads, a.seqlen_q, a.v_head_dim);
  p.causal = a.causal;
  p.diagonal = a.diagonal;
  p.window_left = a.window_left;
  p.window_right = a.window_right;
  p.scale = a.scale;
  p.scale_log2 = a.scale * kLog2E;
  p.softcap = a.softcap;
  p.bias = a.bias;
  p.bias_is_float = a.bias_dtype == kFlashFloat32;
  for (int i = 0; i < 4; ++i) p.bias_stride[i] = a.bias_stride[i];
  p.kv_lengths = a.kv_lengths;
  p.kv_lengths_stride = a.kv_lengths_stride;
  p.sinks = a.sinks;
  p.sinks_stride = a.sinks_stride;
  p.lse = a.lse;
  p.pack = p.splits = 1;
  return p;
}

bool lacksPointers(FlashAttentionArgs const& a) {
  bool const keys = a.seqlen_kv > 0 && (a.key.data == nullptr || a.value.data == nullptr);
  return a.query.data == nullptr || a.output.data == nullptr || keys;
}

// Every dtype's last line is a General one for kMaxHeadDim, so the search ends.
int chooseVariant(FlashAttentionArgs const& a, ForwardParams const& p) {
  bool const plain = p.vector_copies && p.scale > 0.0f && std::isfinite(p.scale_log2) && p.softcap == 0.0f &&
                     p.bias == nullptr;
  int chosen = 0;
  for (Variant const& v : kVariants) {
    if (v.dtype == a.dtype && larger(p.head_dim, p.v_head_dim) <= v.head_dim && (plain || !v.plain)) break;
    ++chosen;
  }
  return chosen;
}

}  // namespace

Variant const& variantFor(FlashAttentionArgs const& args) {
  return kVariants[chooseVariant(args, resolve(args))];
}

Plan planFor(FlashAttentionArgs const& a, bool has_workspace, int multiprocessors) {
  int const chosen = chooseVariant(a, resolve(a));
  Variant const& v = kVariants[chosen];
  Plan plan{chosen, packOf(a.q_num_heads / a.kv_num_heads, a.seqlen_q, v.tile_q), 1};
  if (has_workspace && a.seqlen_q * plan.pack <= kMaxSplitRows) {
    int64_t const blocks = blockCount(a.batch, a.q_num_heads, a.seqlen_q, v.tile_q, plan.pack);
    plan.splits = splitCount(blocks, int(ceilDiv(a.seqlen_kv, v.tile_kv)), multiprocessors);
  }
  return plan;
}

int32_t launchPlanned(FlashAttentionArgs const& a, Plan const& plan, void* workspace, void* stream) {
  ForwardParams params = resolve(a);
  params.pack = plan.pack;
  params.splits = plan.splits;
  if (plan.splits > 1) {
    params.partial_lse = static_cast<float*>(workspace);
    params.partial_output = params.partial_lse + plan.splits * rowCount(a.batch, a.q_num_heads, a.seqlen_q);
  }
  int64_t const blocks =
      blockCount(a.batch, a.q_num_heads, a.seqlen_q, kVariants[plan.variant].tile_q, plan.pack);
  int const status = kLaunchers[plan.variant](params, blocks * plan.splits, stream);
  return status != 0 || plan.splits == 1 ? status : launchCombine(a.dtype, params, stream);
}

}  // namespace flash_export::kernels

using namespace flash_export::kernels;

int32_t flashAttentionWhyUnsupported(FlashAttentionArgs const* args, char* text, size_t text_size) {
  std::vector<std::string> const reasons = whyUnsupported(*args);
  std::string all;
  for (std::string const& reason : reasons) all += (all.empty() ? "" : "\n") + reason;
  if (text != nullptr && text_size > 0) std::snprintf(text, text_size, "%s", all.c_str());
  return int32_t(reasons.size());
}

// Of every split that planFor may choose for this problem or a smaller one: as many splits as there are
// tiles of keys, of as many rows as a split may have.
size_t flashAttentionWorkspace(FlashAttentionArgs const* args) {
  FlashAttentionArgs const& a = *args;
  int64_t const splits = std::min<int64_t>(kMaxSplits, ceilDiv(a.seqlen_kv, kSmallestTileKv));
  if (splits <= 1) return 0;
  int64_t const queries = std::min<int64_t>(a.seqlen_q, kMaxSplitRows);
  int64_t const rows = std::min<int64_t>(splits * rowCount(a.batch, a.q_num_heads, queries),
                                         int64_t(kMaxSplitBlocks) * kMaxSplitRows);
  return size_t(rows) * size_t(a.v_head_dim + 1) * sizeof(float);
}

int32_t flashAttentionLaunch(FlashAttentionArgs const* args, void* workspace, void* stream) {
  FlashAttentionArgs const& a = *args;
  if (!whyUnsupported(a).empty()) return kInvalidValue;
  if (a.batch == 0 || a.seqlen_q == 0) return 0;
  if (lacksPointers(a)) return kInvalidValue;
  int const multiprocessors = workspace == nullptr ? 0 : countMultiprocessors();
  return launchPlanned(a, planFor(a, multiprocessors > 0, multiprocessors), workspace, stream);
}
