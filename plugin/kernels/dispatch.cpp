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
#include "reasons.h"
#include "tensors.h"

namespace flash_export::kernels {

#define FLASH_VARIANT(Element, head_dim, tile_q, tile_kv, warps, features) \
  int FLASH_LAUNCHER(Element, head_dim, features)(ForwardParams const&, int64_t, void*);
#include "variants.inc"
#undef FLASH_VARIANT

namespace {

constexpr int kInvalidValue = 1;                            // cudaErrorInvalidValue
constexpr int64_t kMaxPageStride = (int64_t{1} << 30) - 1;  // elements: bytes stay in 32 bits

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

void alignment(Reasons& why, FlashAttentionArgs const& a) {
  int const bytes = bytesOf(a.dtype);
  why.aligned("query.data", a.query.data, bytes);
  why.aligned("key.data", a.key.data, bytes);
  why.aligned("value.data", a.value.data, bytes);
  why.aligned("output.data", a.output.data, bytes);
  why.aligned("bias", a.bias, bytesOf(a.bias_dtype));
  why.aligned("kv_lengths", a.kv_lengths, 4);
  why.aligned("sinks", a.sinks, 4);
  why.aligned("lse", a.lse, 4);
  why.aligned("cu_seqlens_q", a.cu_seqlens_q, 4);
  why.aligned("cu_seqlens_kv", a.cu_seqlens_kv, 4);
  why.aligned("page_table", a.page_table, 4);
}

Extent extentOfQueries(FlashAttentionArgs const& a) {
  if (a.cu_seqlens_q != nullptr) return {1, a.q_num_heads, a.total_q};
  return {a.batch, a.q_num_heads, a.seqlen_q};
}

Extent extentOfKeys(FlashAttentionArgs const& a) {
  if (a.page_table != nullptr) return {a.page_count, a.kv_num_heads, a.page_size};
  if (a.cu_seqlens_kv != nullptr) return {1, a.kv_num_heads, a.total_kv};
  return {a.batch, a.kv_num_heads, a.seqlen_kv};
}

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
  why.inRange("seqlen_kv", a.seqlen_kv, 0, kMaxKeys);
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
  if (a.kv_lengths != nullptr) why.inRange("kv_lengths_stride", a.kv_lengths_stride, 0, 1);
  if (a.sinks != nullptr) why.inRange("sinks_stride", a.sinks_stride, 0, 1);
  if (a.cu_seqlens_q != nullptr) why.inRange("total_q", a.total_q, 0, INT32_MAX);
  if (a.cu_seqlens_kv != nullptr) why.inRange("total_kv", a.total_kv, 0, INT32_MAX);
  if (a.page_table != nullptr) {
    why.pages(a.page_size);
    why.inRange("page_count", a.page_count, a.seqlen_kv > 0, INT32_MAX);
    for (FlashTensor const* t : {&a.key, &a.value}) {
      char const* const which = t == &a.key ? "of key" : "of value";
      why.inRange((std::string("batch_stride ") + which).c_str(), t->batch_stride, 0, kMaxPageStride);
      why.inRange((std::string("row_stride ") + which).c_str(), t->row_stride, 0, kMaxPageStride);
    }
    why.unless(a.cu_seqlens_kv == nullptr, [] {
      return std::string("cu_seqlens_kv is given beside page_table; the kernels take one of them.");
    });
  }
  alignment(why, a);
  if (!why.sentences().empty()) return why.sentences();
  why.rowsApart("output", a.output, extentOfQueries(a), a.v_head_dim);
  why.blocks(double(a.batch) * a.q_num_heads * double(ceilDiv(a.seqlen_q, kSmallestTileQ)),
             "batch " + std::to_string(a.batch) + ", " + std::to_string(a.q_num_heads) + " heads and " +
                 std::to_string(a.seqlen_q) + " rows");
  return why.sentences();
}

ForwardParams resolve(FlashAttentionArgs const& a) {
  ForwardParams p{};
  p.query = withBatches(a.query, a.cu_seqlens_q != nullptr);
  p.key = withBatches(a.key, a.cu_seqlens_kv != nullptr);
  p.value = withBatches(a.value, a.cu_seqlens_kv != nullptr);
  p.output = withBatches(a.output, a.cu_seqlens_q != nullptr);
  p.batch = a.batch;
  p.q_heads = a.q_num_heads;
  p.kv_heads = a.kv_num_heads;
  p.group = a.q_num_heads / a.kv_num_heads;
  p.head_dim = a.head_dim;
  p.v_head_dim = a.v_head_dim;
  p.seqlen_q = int(a.seqlen_q);
  p.seqlen_kv = int(a.seqlen_kv);
  p.vector_copies = copiesVectors(a.query, a.dtype, extentOfQueries(a), a.head_dim) &&
                    copiesVectors(a.key, a.dtype, extentOfKeys(a), a.head_dim) &&
                    copiesVectors(a.value, a.dtype, extentOfKeys(a), a.v_head_dim) &&
                    copiesVectors(a.output, a.dtype, extentOfQueries(a), a.v_head_dim);
  p.causal = a.causal;
  p.diagonal = a.diagonal;
  p.window_left = a.window_left;
  p.window_right = a.window_right;
  p.scale = a.scale;
  p.scale_log2 = a.scale * kLog2E;
  p.lazy_growth = kLazyGrowth / p.scale_log2;
  p.softcap = a.softcap;
  p.bias = a.bias;
  p.bias_is_float = a.bias_dtype == kFlashFloat32;
  for (int i = 0; i < 4; ++i) p.bias_stride[i] = a.bias_stride[i];
  p.kv_lengths = a.kv_lengths;
  p.kv_lengths_stride = a.kv_lengths_stride;
  p.sinks = a.sinks;
  p.sinks_stride = a.sinks_stride;
  p.lse = a.lse;
  p.cu_seqlens_q = a.cu_seqlens_q;
  p.cu_seqlens_kv = a.cu_seqlens_kv;
  p.total_q = a.cu_seqlens_q == nullptr ? 0 : int(a.total_q);
  p.total_kv = a.cu_seqlens_kv == nullptr ? 0 : int(a.total_kv);
  p.page_table = a.page_table;
  p.page_table_stride = a.page_table_stride;
  p.page_bits = a.page_table == nullptr ? 0 : bitsOfPage(a.page_size);
  p.page_count = a.page_table == nullptr ? 0 : a.page_count;
  p.last_page = a.page_table == nullptr ? 0 : uint32_t(larger(a.page_count, 1) - 1);
  p.pack = p.splits = 1;
  return p;
}

// The workspace is of floats.
bool lacksMemory(FlashAttentionArgs const& a, void const* workspace) {
  if (reinterpret_cast<uintptr_t>(workspace) % sizeof(float) != 0) return true;
  bool const some = a.seqlen_kv > 0 && (a.cu_seqlens_kv == nullptr || a.total_kv > 0);
  bool const keys = some && (a.key.data == nullptr || a.value.data == nullptr);
  return a.query.data == nullptr || a.output.data == nullptr || keys;
}

// Every dtype's last line is a General one for kMaxHeadDim, so the search ends.
int chooseVariant(FlashAttentionArgs const& a, ForwardParams const& p) {
  bool const plain = p.vector_copies && p.scale > 0.0f && p.scale_log2 <= kMaxFoldedScale &&
                     p.softcap == 0.0f && p.bias == nullptr;
  Features const wanted = a.page_table != nullptr ? Features::kPaged : Features::kPlain;
  int chosen = 0;
  for (Variant const& v : kVariants) {
    bool const able = v.general() || (plain && v.features == wanted);
    if (v.dtype == a.dtype && larger(p.head_dim, p.v_head_dim) <= v.head_dim && able) break;
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
    int64_t const rows = plan.splits * rowCount(a.batch, a.q_num_heads, a.seqlen_q);
    params.partial_max = static_cast<float*>(workspace);
    params.partial_sum = params.partial_max + rows;
    params.partial_output = params.partial_sum + rows;
  }
  int64_t const blocks =
      blockCount(a.batch, a.q_num_heads, a.seqlen_q, kVariants[plan.variant].tile_q, plan.pack);
  int const status = kLaunchers[plan.variant](params, blocks * plan.splits, stream);
  return status != 0 || plan.splits == 1 ? status : launchCombine(a.dtype, params, stream);
}

}  // namespace flash_export::kernels

using namespace flash_export::kernels;

int32_t flashAttentionWhyUnsupported(FlashAttentionArgs const* args, char* text, size_t text_size) {
  return joinReasons(whyUnsupported(*args), text, text_size);
}

// Of every split that planFor may choose for this problem or a smaller one: as many splits as there are
// tiles of keys, of as many rows as a split may have. The sizes may be any numbers.
size_t flashAttentionWorkspace(FlashAttentionArgs const* args) {
  FlashAttentionArgs const& a = *args;
  int64_t const keys = std::min<int64_t>(a.seqlen_kv, kMaxKeys);
  int64_t const splits = std::min<int64_t>(kMaxSplits, ceilDiv(keys, kSmallestTileKv));
  int64_t const queries = std::min<int64_t>(a.seqlen_q, kMaxSplitRows);
  if (splits <= 1 || std::min({a.batch, a.q_num_heads, a.v_head_dim}) <= 0 || queries <= 0) return 0;
  double const rows = std::min(double(splits) * a.batch * a.q_num_heads * double(queries),
                               double(kMaxSplitBlocks) * kMaxSplitRows);
  return size_t(rows) * size_t(std::min(a.v_head_dim, kMaxHeadDim) + 2) * sizeof(float);
}

int32_t flashAttentionLaunch(FlashAttentionArgs const* args, void* workspace, void* stream) {
  FlashAttentionArgs const& a = *args;
  if (!whyUnsupported(a).empty()) return kInvalidValue;
  if (a.batch == 0 || extentOfQueries(a).rows == 0 || a.seqlen_q == 0) return 0;
  if (lacksMemory(a, workspace)) return kInvalidValue;
  int const multiprocessors = workspace == nullptr ? 0 : countMultiprocessors();
  return launchPlanned(a, planFor(a, multiprocessors > 0, multiprocessors), workspace, stream);
}
