// SPDX-License-Identifier: Apache-2.0
#include "launch_emulated.h"

#include <cstdlib>
#include <mutex>
#include <random>
#include <string>

#include "machine.h"

namespace flash_export::emulation {
namespace {

constexpr int kLaunchFailure = 719;

thread_local std::string last_error;

struct {
  std::mutex mutex;
  std::set<std::string> names;
} launched;

uint64_t chooseSeed() {
  if (char const* const given = std::getenv("FLASH_EMULATION_SEED")) return std::strtoull(given, nullptr, 10);
  return std::random_device{}();
}

// One axis of a strided tensor: `size` steps of `stride` elements.
struct Axis {
  int64_t size, stride;
};

// Registers the bytes from the first to the last element.
void addTensor(char const* name, void const* data, size_t element_bytes, std::initializer_list<Axis> axes,
               bool writable) {
  int64_t lowest = 0, highest = 0;
  for (Axis const& axis : axes) {
    if (axis.size <= 0) return;
    int64_t const reach = (axis.size - 1) * axis.stride;
    (reach < 0 ? lowest : highest) += reach;
  }
  auto const* const first = static_cast<char const*>(data);
  int64_t const bytes = int64_t(element_bytes);
  machine().global.add(name, first + lowest * bytes, first + (highest + 1) * bytes, writable);
}

void addTensors(kernels::ForwardParams const& p, size_t element_bytes) {
  struct Rows {
    int64_t batches, count;
  };
  auto const add = [&](char const* name, FlashTensor const& t, int64_t heads, Rows rows, int64_t columns,
                       bool writable) {
    addTensor(
        name, t.data, element_bytes,
        {{rows.batches, t.batch_stride}, {heads, t.head_stride}, {rows.count, t.row_stride}, {columns, 1}},
        writable);
  };
  bool const packed_q = p.cu_seqlens_q != nullptr, packed_kv = p.cu_seqlens_kv != nullptr;
  Rows const queries = packed_q ? Rows{1, p.total_q} : Rows{p.batch, p.seqlen_q};
  Rows const keys = packed_kv                 ? Rows{1, p.total_kv}
                    : p.page_table != nullptr ? Rows{p.page_count, 1 << p.page_bits}
                                              : Rows{p.batch, p.seqlen_kv};
  machine().global.clear();
  add("query", p.query, p.q_heads, queries, p.head_dim, false);
  add("key", p.key, p.kv_heads, keys, p.head_dim, false);
  add("value", p.value, p.kv_heads, keys, p.v_head_dim, false);
  add("output", p.output, p.q_heads, queries, p.v_head_dim, true);
  if (packed_q) addTensor("cu_seqlens_q", p.cu_seqlens_q, 4, {{p.batch + 1, 1}}, false);
  if (packed_kv) addTensor("cu_seqlens_kv", p.cu_seqlens_kv, 4, {{p.batch + 1, 1}}, false);
  if (p.page_table != nullptr) {
    addTensor("page_table", p.page_table, 4,
              {{p.batch, p.page_table_stride}, {kernels::ceilDiv(p.seqlen_kv, 1 << p.page_bits), 1}}, false);
  }
  if (p.bias != nullptr) {
    addTensor("bias", p.bias, p.bias_is_float ? 4 : element_bytes,
              {{p.batch, p.bias_stride[0]},
               {p.q_heads, p.bias_stride[1]},
               {p.seqlen_q, p.bias_stride[2]},
               {p.seqlen_kv, p.bias_stride[3]}},
              false);
  }
  if (p.kv_lengths != nullptr)
    addTensor("kv_lengths", p.kv_lengths, 4, {{p.batch, p.kv_lengths_stride}}, false);
  if (p.sinks != nullptr) addTensor("sinks", p.sinks, 4, {{p.q_heads, p.sinks_stride}}, false);
  if (p.lse != nullptr) {
    addTensor("lse", p.lse, 4, {{p.q_heads * queries.batches * queries.count, 1}}, true);
  }
  if (p.splits > 1) {
    int64_t const rows = p.splits * kernels::rowCount(p.batch, p.q_heads, p.seqlen_q);
    addTensor("partial_output", p.partial_output, 4, {{rows * p.v_head_dim, 1}}, true);
    addTensor("partial_max", p.partial_max, 4, {{rows, 1}}, true);
    addTensor("partial_sum", p.partial_sum, 4, {{rows, 1}}, true);
  }
}

void addTensors(kernels::AppendParams const& p, size_t element_bytes) {
  struct Rows {
    int64_t batches, count;
  };
  auto const add = [&](char const* name, FlashTensor const& t, Rows rows, int columns, bool writable) {
    addTensor(
        name, t.data, element_bytes,
        {{rows.batches, t.batch_stride}, {p.heads, t.head_stride}, {rows.count, t.row_stride}, {columns, 1}},
        writable);
  };
  bool const packed = p.cu_seqlens_new != nullptr, paged = p.page_table != nullptr;
  Rows const fresh = packed ? Rows{1, p.total_new} : Rows{p.batch, p.seqlen_new};
  Rows const cached = paged ? Rows{p.page_count, 1 << p.page_bits} : Rows{p.batch, p.capacity};
  machine().global.clear();
  add("key", p.key, fresh, p.head_dim, false);
  add("value", p.value, fresh, p.v_head_dim, false);
  add("key_cache", p.key_cache, cached, p.head_dim, true);
  add("value_cache", p.value_cache, cached, p.v_head_dim, true);
  addTensor("kv_lengths", p.kv_lengths, 4, {{p.batch, p.kv_lengths_stride}}, false);
  if (p.lengths_after != nullptr) addTensor("lengths_after", p.lengths_after, 4, {{p.batch, 1}}, true);
  if (packed) addTensor("cu_seqlens_new", p.cu_seqlens_new, 4, {{p.batch + 1, 1}}, false);
  if (paged) {
    addTensor("page_table", p.page_table, 4,
              {{p.batch, p.page_table_stride}, {kernels::ceilDiv(p.capacity, 1 << p.page_bits), 1}}, false);
  }
}

template <class Params>
int launchWith(Params const& params, size_t element_bytes, int64_t blocks, int threads, int shared_bytes,
               void (*kernel)(Params const&), char const* name) {
  {
    std::lock_guard<std::mutex> const lock(launched.mutex);
    launched.names.insert(name);
  }
  struct Context {
    Params const& params;
    void (*kernel)(Params const&);
  } const context{params, kernel};
  auto const body = [](void const* c) {
    auto const& the_context = *static_cast<Context const*>(c);
    the_context.kernel(the_context.params);
  };
  addTensors(params, element_bytes);
  uint64_t const seed = chooseSeed();
  last_error = machine().launch(blocks, threads, shared_bytes, seed, body, &context);
  if (last_error.empty()) return 0;
  last_error += " (FLASH_EMULATION_SEED=" + std::to_string(seed) + " repeats it)";
  return kLaunchFailure;
}

}  // namespace

int launch(kernels::ForwardParams const& params, size_t element_bytes, int64_t blocks, int threads,
           int shared_bytes, void (*kernel)(kernels::ForwardParams const&), char const* name) {
  return launchWith(params, element_bytes, blocks, threads, shared_bytes, kernel, name);
}

int launch(kernels::AppendParams const& params, size_t element_bytes, int64_t blocks, int threads,
           int shared_bytes, void (*kernel)(kernels::AppendParams const&), char const* name) {
  return launchWith(params, element_bytes, blocks, threads, shared_bytes, kernel, name);
}

GuardBand::GuardBand(void const* begin, size_t bytes) : mBegin(begin) {
  machine().global.guard(begin, static_cast<char const*>(begin) + bytes);
}

GuardBand::~GuardBand() { machine().global.unguard(mBegin); }

std::set<std::string> launchedKernels() {
  std::lock_guard<std::mutex> const lock(launched.mutex);
  return launched.names;
}

}  // namespace flash_export::emulation

char const* flashEmulationError() { return flash_export::emulation::last_error.c_str(); }

uint64_t flashEmulationBankConflicts() { return flash_export::emulation::machine().bank_conflicts; }
