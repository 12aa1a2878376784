// SPDX-License-Identifier: Apache-2.0
#include "append_cases.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "emulation/launch_emulated.h"

namespace kernel_tests {
namespace {

// [outer, rows, heads, dim] or [outer, heads, rows, dim], `gap` elements behind every row and `before` ahead.
struct Array {
  int outer, heads, rows, dim, gap, bytes, before;
  bool heads_first;
  std::vector<unsigned char> storage;

  // `number`: of 1 ... 4, as AppendCase::shifted has them.
  Array(AppendCase const& c, int outer_size, int row_count, int head_dim, int number)
      : outer(outer_size),
        heads(c.heads),
        rows(row_count),
        dim(head_dim),
        gap(c.gap),
        bytes(c.dtype == kFlashFloat32 ? 4 : 2),
        before(c.shifted == number ? 1 : 0),
        heads_first(c.heads_first) {
    size_t const elements = size_t(outer) * size_t(heads) * size_t(rows) * size_t(dim + gap) + size_t(before);
    storage.resize(elements * size_t(bytes));
    std::mt19937 random{uint32_t(number)};
    for (unsigned char& byte : storage) byte = static_cast<unsigned char>(random());  // NaN patterns too
  }
  FlashTensor view() {
    int64_t const step = dim + gap, all = step * heads * rows;
    unsigned char* const first = storage.data() + before * bytes;
    if (heads_first) return {first, all, step * rows, step};
    return {first, all, step, step * heads};
  }
  unsigned char* at(int o, int h, int row) {
    int const index = heads_first ? (o * heads + h) * rows + row : (o * rows + row) * heads + h;
    return storage.data() + (size_t(index) * size_t(dim + gap) + size_t(before)) * size_t(bytes);
  }
};

// What the door is asked to do, done row by row.
struct Expected {
  AppendCase const& c;
  std::vector<int32_t> const &starts, &table;
  int page_count;

  int rowsOf(int b) const { return c.rows_of.empty() ? c.seqlen_new : c.rows_of[size_t(b)]; }
  int before(int b) const {
    int const given = c.kv_lengths[c.kv_lengths.size() == 1 ? 0 : size_t(b)];
    return std::min(std::max(given, 0), c.capacity);
  }
  int after(int b) const { return std::min(before(b) + rowsOf(b), c.capacity); }

  void append(Array& fresh, Array& cache) const {
    for (int b = 0; b < c.batch; ++b) {
      for (int i = 0; i < c.heads * rowsOf(b); ++i) {
        int const h = i % c.heads, row = i / c.heads;
        int place = before(b) + row, outer = b;
        if (place >= c.capacity) continue;
        if (c.page_size != 0) {
          int const width = (c.capacity + c.page_size - 1) / c.page_size;
          outer = table[size_t(b * width + place / c.page_size)];
          place %= c.page_size;
          if (outer < 0 || outer >= page_count) continue;
        }
        unsigned char const* const from =
            starts.empty() ? fresh.at(b, h, row) : fresh.at(0, h, starts[size_t(b)] + row);
        std::memcpy(cache.at(outer, h, place), from, size_t(fresh.dim * fresh.bytes));
      }
    }
  }
};

std::vector<int32_t> shuffledPages(AppendCase const& c, int page_count) {
  std::vector<int32_t> table(static_cast<size_t>(page_count));
  for (int i = 0; i < page_count; ++i) table[size_t(i)] = i;
  std::shuffle(table.begin(), table.end(), std::mt19937{5});
  int const none[] = {-1, page_count, INT32_MIN};
  for (size_t i = 0; c.broken_table && i < table.size(); i += 3) table[i] = none[i % 9 / 3];
  return table;
}

}  // namespace

std::string AppendCase::describe() const {
  static char const* const dtypes[] = {"fp32", "fp16", "bf16"};
  std::string s = std::string("append ") + dtypes[dtype];
  auto const add = [&](char const* name, int value) { s += std::string(" ") + name + std::to_string(value); };
  add("B ", batch);
  add("H ", heads);
  add("D ", head_dim);
  add("Dv ", v_head_dim);
  add("new ", seqlen_new);
  add("capacity ", capacity);
  if (page_size != 0) add("page ", page_size);
  for (int length : kv_lengths) add("length ", length);
  for (int rows : rows_of) add("rows ", rows);
  if (gap != 0) s += " gaps";
  if (shifted != 0) add("shifted ", shifted);
  if (heads_first) s += " heads-first";
  if (broken_table) s += " broken";
  return s;
}

std::vector<AppendCase> appendCases() {
  std::vector<AppendCase> all;
  for (FlashDtype dtype : {kFlashFloat16, kFlashBFloat16, kFlashFloat32}) {
    std::vector<AppendCase> few(13);
    few[1].heads_first = true;
    few[1].page_size = 16;
    few[2].gap = 1;
    few[2].head_dim = 33;
    few[2].v_head_dim = 7;
    few[2].page_size = 32;
    few[3].rows_of = {3, 0, 5};  // packed
    few[3].head_dim = 256;
    few[4].rows_of = {0, 5, 1};
    few[4].page_size = 64;
    few[4].heads_first = true;
    few[5].kv_lengths = {68, -3, 1000};  // two rows of five fit, all, none
    few[5].seqlen_new = 5;
    few[6].kv_lengths = {60};  // one length for all
    few[6].seqlen_new = 17;
    few[6].page_size = 16;
    few[6].broken_table = true;
    few[7].seqlen_new = 0;  // lengths alone
    few[8].seqlen_new = 1;  // a step of decoding
    few[8].page_size = 256;
    few[8].capacity = 512;
    few[8].kv_lengths = {255, 256, 511};
    few[8].wants_lengths = false;
    for (int i = 1; i <= 4; ++i) few[size_t(8 + i)].shifted = i;
    for (AppendCase& c : few) c.dtype = dtype;
    all.insert(all.end(), few.begin(), few.end());
  }
  return all;
}

std::string runAppend(AppendCase const& c) {
  int const width = c.page_size == 0 ? 0 : (c.capacity + c.page_size - 1) / c.page_size;
  int const page_count = c.batch * width;
  std::vector<int32_t> const table = shuffledPages(c, page_count);
  std::vector<int32_t> starts;
  if (!c.rows_of.empty()) starts.push_back(1);  // a row before the first
  for (int rows : c.rows_of) starts.push_back(starts.back() + rows);
  int const fresh_batches = starts.empty() ? c.batch : 1;
  int const fresh_rows = starts.empty() ? c.seqlen_new : starts.back() + 1;
  Array key(c, fresh_batches, fresh_rows, c.head_dim, 1),
      value(c, fresh_batches, fresh_rows, c.v_head_dim, 2);
  int const outer = c.page_size == 0 ? c.batch : page_count,
            rows = c.page_size == 0 ? c.capacity : c.page_size;
  Array key_cache(c, outer, rows, c.head_dim, 3), value_cache(c, outer, rows, c.v_head_dim, 4);
  Array wanted_key = key_cache, wanted_value = value_cache;
  Expected const expected{c, starts, table, page_count};
  expected.append(key, wanted_key);
  expected.append(value, wanted_value);

  std::vector<int32_t> const lengths(c.kv_lengths.begin(), c.kv_lengths.end());
  std::vector<int32_t> after(size_t(c.batch), -7);
  FlashAppendArgs a{};
  a.dtype = c.dtype;
  a.batch = c.batch;
  a.kv_num_heads = c.heads;
  a.head_dim = c.head_dim;
  a.v_head_dim = c.v_head_dim;
  a.seqlen_new = c.seqlen_new;
  a.capacity = c.capacity;
  a.key = key.view();
  a.value = value.view();
  a.key_cache = key_cache.view();
  a.value_cache = value_cache.view();
  a.kv_lengths = lengths.data();
  a.kv_lengths_stride = lengths.size() > 1 ? 1 : 0;
  a.lengths_after = c.wants_lengths ? after.data() : nullptr;
  a.cu_seqlens_new = starts.empty() ? nullptr : starts.data();
  a.total_new = fresh_rows;
  if (c.page_size != 0) {
    a.page_size = c.page_size;
    a.page_count = page_count;
    a.page_table = table.data();
    a.page_table_stride = width;
  }
  char why[512];
  if (flashAttentionAppendWhyUnsupported(&a, why, sizeof why) != 0) return std::string("refused: ") + why;
  if (int const status = flashAttentionAppend(&a, nullptr); status != 0) {
    return "status " + std::to_string(status) + ": " + flashEmulationError();
  }
  if (key_cache.storage != wanted_key.storage) return "the key cache has other bytes";
  if (value_cache.storage != wanted_value.storage) return "the value cache has other bytes";
  for (int b = 0; b < c.batch; ++b) {
    int const length = c.wants_lengths ? expected.after(b) : -7;
    if (after[size_t(b)] != length) {
      return "length after of batch " + std::to_string(b) + " is " + std::to_string(after[size_t(b)]);
    }
  }
  return "";
}

}  // namespace kernel_tests
