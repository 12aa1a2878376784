// SPDX-License-Identifier: Apache-2.0
// The append kernel's door, and a cache that grows: attention over it equals attention over all keys at once.
#include <cstring>
#include <functional>
#include <vector>

#include "../runner.h"
#include "emulation/launch_emulated.h"
#include "problem.h"

using namespace kernel_tests;

namespace {

using Change = std::function<void(FlashAppendArgs&)>;
int32_t const kLengths[] = {3, 4};
int32_t const kMark = 0;
int32_t const* const kHere = &kMark;  // a table that a test places

FlashAppendArgs goodArgs() {
  FlashAppendArgs a{};
  a.dtype = kFlashFloat16;
  a.batch = 2;
  a.kv_num_heads = 2;
  a.head_dim = a.v_head_dim = 64;
  a.seqlen_new = 1;
  a.capacity = 100;
  a.kv_lengths = kLengths;
  a.kv_lengths_stride = 1;
  return a;
}

void expectRefused(Change const& change, char const* words) {
  FlashAppendArgs a = goodArgs();
  change(a);
  char text[512];
  int const reasons = flashAttentionAppendWhyUnsupported(&a, text, sizeof text);
  EXPECT(reasons == 1 && std::strstr(text, words) != nullptr, "'" << text << "' lacks '" << words << "'");
  EXPECT(flashAttentionAppend(&a, nullptr) == 1, "a refused append was launched");
}

}  // namespace

TEST(bad_arguments_of_an_append_are_refused_with_their_numbers) {
  FlashAppendArgs const good = goodArgs();
  EXPECT(flashAttentionAppendWhyUnsupported(&good, nullptr, 0) == 0);
  expectRefused([](auto& a) { a.dtype = 3; }, "dtype is 3");
  expectRefused([](auto& a) { a.batch = -1; }, "batch is -1");
  expectRefused([](auto& a) { a.kv_num_heads = 0; }, "kv_num_heads is 0");
  expectRefused([](auto& a) { a.head_dim = 257; }, "head_dim is 257");
  expectRefused([](auto& a) { a.v_head_dim = 0; }, "v_head_dim is 0");
  expectRefused([](auto& a) { a.seqlen_new = -2; }, "seqlen_new is -2");
  expectRefused([](auto& a) { a.capacity = int64_t{1} << 40; }, "capacity is 1099511627776");
  expectRefused([](auto& a) { a.kv_lengths_stride = 2; }, "kv_lengths_stride is 2");
  expectRefused([](auto& a) { a.reserved = 1; }, "reserved is 1");
  expectRefused(
      [](auto& a) {
        a.cu_seqlens_new = kLengths;
        a.total_new = -1;
      },
      "total_new is -1");
  expectRefused(
      [](auto& a) {
        a.page_table = kLengths;
        a.page_size = 20;
      },
      "page_size is 20");
  expectRefused(
      [](auto& a) {
        a.page_table = kLengths;
        a.page_size = INT32_MIN;
      },
      "page_size is -2147483648");
  EXPECT(flashAttentionAppend(&good, nullptr) == 1, "missing pointers are an error and no crash");
  FlashAppendArgs empty = goodArgs();
  empty.batch = 0;
  EXPECT(flashAttentionAppend(&empty, nullptr) == 0);
}

namespace {

// lengths_after, of two numbers, is tried all over a memory in which `place` puts a table at 100; it is
// refused where it meets one of the numbers that the table has.
void expectApart(char const* name, Change const& place, std::vector<int> const& numbers) {
  static int32_t memory[240];
  for (int at = 60; at < 180; ++at) {
    FlashAppendArgs a = goodArgs();
    place(a);
    for (int32_t const** table : {&a.kv_lengths, &a.cu_seqlens_new, &a.page_table}) {
      if (*table == kHere) *table = memory + 100;
    }
    a.lengths_after = memory + at;
    bool meets = false;
    for (int number : numbers) meets = meets || number == at || number == at + 1;
    char text[512];
    int const reasons = flashAttentionAppendWhyUnsupported(&a, text, sizeof text);
    std::string const wanted =
        std::string("lengths_after overlaps ") + name + "; the kernels need memory of its own for it.";
    EXPECT(reasons == (meets ? 1 : 0) && text == (meets ? wanted : ""), name << ", " << at << ": " << text);
    if (meets) EXPECT(flashAttentionAppend(&a, nullptr) == 1, "a refused append was launched");
  }
}

std::vector<int> range(int first, int last) {
  std::vector<int> all;
  for (int i = first; i <= last; ++i) all.push_back(i);
  return all;
}

// Seven pages a batch, two batches.
void expectApartFromPages(int64_t stride, int second_row) {
  std::vector<int> numbers = range(100, 106);
  for (int i : range(second_row, second_row + 6)) numbers.push_back(i);
  expectApart(
      "page_table",
      [stride](auto& a) {
        a.page_table = kHere;
        a.page_size = 16;
        a.page_table_stride = stride;
      },
      numbers);
}

}  // namespace

TEST(lengths_after_in_memory_that_blocks_read_is_refused) {
  expectApart("kv_lengths", [](auto& a) { a.kv_lengths = kHere; }, {100, 101});
  expectApart("kv_lengths",
              [](auto& a) {
                a.kv_lengths = kHere;
                a.kv_lengths_stride = 0;
              },
              {100});
  expectApart("cu_seqlens_new", [](auto& a) { a.cu_seqlens_new = kHere; }, {100, 101, 102});
  expectApartFromPages(7, 107);
  expectApartFromPages(0, 100);
  expectApartFromPages(20, 120);
  expectApartFromPages(-20, 80);
  expectApartFromPages(INT64_MAX, 100);  // out of sight
  expectApartFromPages(INT64_MIN, 100);
}

// Keys come in pieces of several sizes into pages; after each, the newest queries attend to all keys so far.
TEST(a_cache_that_grows_gives_the_bits_of_one_that_is_whole) {
  for (FlashDtype dtype : {kFlashFloat16, kFlashBFloat16, kFlashFloat32}) {
    Problem p;
    p.dtype = dtype;
    p.seqlen_q = p.seqlen_kv = 90;
    p.page_size = 32;
    p.causal = p.diagonal = 1;
    Problem whole = p;
    whole.page_size = 0;
    Tensors all(whole), grown(p);
    for (int h = 0; h < p.heads_kv; ++h) {
      for (int i = 0; i < p.seqlen_kv * p.head_dim; ++i) {
        grown.setKey(0, h, i / p.head_dim, i % p.head_dim, -1e4);
        grown.setValue(0, h, i / p.head_dim, i % p.head_dim, 1e4);
      }
    }
    FlashAttentionArgs const from = all.args();
    FlashAttentionArgs const in = grown.args();
    int64_t const bytes = dtype == kFlashFloat32 ? 4 : 2;
    int32_t length = 0;
    for (int piece : {40, 1, 1, 48}) {
      FlashAppendArgs a{};
      a.dtype = dtype;
      a.batch = 1;
      a.kv_num_heads = p.heads_kv;
      a.head_dim = a.v_head_dim = p.head_dim;
      a.seqlen_new = piece;
      a.capacity = p.seqlen_kv;
      a.key = from.key;
      a.value = from.value;
      a.key.data = static_cast<char*>(from.key.data) + length * from.key.row_stride * bytes;
      a.value.data = static_cast<char*>(from.value.data) + length * from.value.row_stride * bytes;
      a.key_cache = in.key;
      a.value_cache = in.value;
      a.page_size = in.page_size;
      a.page_count = in.page_count;
      a.page_table = in.page_table;
      a.page_table_stride = in.page_table_stride;
      int32_t after = -1;
      a.kv_lengths = &length;
      a.lengths_after = &after;
      EXPECT(flashAttentionAppend(&a, nullptr) == 0, flashEmulationError());
      EXPECT(after == length + piece, after);
      Tensors apart(whole);
      for (FlashAttentionArgs args : {in, apart.args()}) {
        args.query = from.query;
        args.query.data = static_cast<char*>(from.query.data) + length * from.query.row_stride * bytes;
        args.seqlen_q = piece;
        args.kv_lengths = &after;
        args.kv_lengths_stride = 0;
        args.lse = nullptr;
        EXPECT(flashAttentionLaunch(&args, nullptr, nullptr) == 0, flashEmulationError());
      }
      for (int i = 0; i < piece * p.heads_q * p.v_head_dim; ++i) {
        int const d = i % p.v_head_dim, h = i / p.v_head_dim % p.heads_q, row = i / p.v_head_dim / p.heads_q;
        EXPECT(grown.output(0, h, row, d) == apart.output(0, h, row, d), length << " + " << row);
      }
      length = after;
    }
  }
}
