// SPDX-License-Identifier: Apache-2.0
// The limits that flash_attention.h names: the last number that is taken and the first that is refused; what
// a launch answers then; strides and addresses of every kind.
#include <climits>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../runner.h"
#include "dispatch.h"
#include "emulation/launch_emulated.h"
#include "problem.h"

using namespace kernel_tests;

namespace {

constexpr int64_t kLongest = int64_t{1} << 28;
constexpr int64_t kMostKeys = int64_t{1} << 24;
constexpr int64_t kMostTotal = INT32_MAX;
int32_t const kNumbers[4] = {0, 0, 0, 0};

FlashAttentionArgs goodArgs() {
  FlashAttentionArgs a{};
  a.dtype = kFlashFloat16;
  a.batch = a.q_num_heads = a.kv_num_heads = 1;
  a.head_dim = a.v_head_dim = 64;
  a.seqlen_q = a.seqlen_kv = 100;
  a.scale = 0.125f;
  a.window_left = a.window_right = -1;
  return a;
}

FlashAppendArgs goodAppend() {
  FlashAppendArgs a{};
  a.dtype = kFlashFloat16;
  a.batch = a.kv_num_heads = 1;
  a.head_dim = a.v_head_dim = 64;
  a.seqlen_new = 1;
  a.capacity = 100;
  a.kv_lengths = kNumbers;
  return a;
}

std::string whyNot(FlashAttentionArgs const& a) {
  char text[1024];
  flashAttentionWhyUnsupported(&a, text, sizeof text);
  return text;
}

std::string whyNot(FlashAppendArgs const& a) {
  char text[1024];
  flashAttentionAppendWhyUnsupported(&a, text, sizeof text);
  return text;
}

int32_t launch(FlashAttentionArgs const& a) { return flashAttentionLaunch(&a, nullptr, nullptr); }
int32_t launch(FlashAppendArgs const& a) { return flashAttentionAppend(&a, nullptr); }

// `last` is taken; `beyond` is refused, by name, and a launch answers cudaErrorInvalidValue.
template <class Args>
void expectEdge(Args args, std::function<void(Args&, int64_t)> const& set, int64_t last, int64_t beyond,
                std::string const& words) {
  set(args, last);
  EXPECT(whyNot(args).empty(), last << ": " << whyNot(args));
  set(args, beyond);
  EXPECT(whyNot(args).find(words) != std::string::npos, "'" << whyNot(args) << "' lacks '" << words << "'");
  EXPECT(launch(args) == 1, words);
}

template <class Args, class Number>
std::function<void(Args&, int64_t)> field(Number Args::* member) {
  return [member](Args& args, int64_t value) { args.*member = Number(value); };
}

void page(FlashAttentionArgs& a) {
  a.page_table = kNumbers;
  a.page_size = 16;
  a.page_count = 1;
}

}  // namespace

TEST(every_limit_of_an_attention_is_where_the_header_says) {
  using Args = FlashAttentionArgs;
  Args const good = goodArgs();
  Args paged = good, packed = good;
  page(paged);
  packed.cu_seqlens_q = packed.cu_seqlens_kv = kNumbers;
  expectEdge(good, field(&Args::head_dim), 1, 0, "head_dim is 0");
  expectEdge(good, field(&Args::head_dim), 256, 257, "head_dim is 257");
  expectEdge(good, field(&Args::v_head_dim), 1, 0, "v_head_dim is 0");
  expectEdge(good, field(&Args::v_head_dim), 256, 257, "v_head_dim is 257");
  expectEdge(good, field(&Args::q_num_heads), 65535, 65536, "q_num_heads is 65536");
  Args grouped = good;
  grouped.q_num_heads = 65535;
  expectEdge(grouped, field(&Args::kv_num_heads), 65535, 65536, "kv_num_heads is 65536");
  expectEdge(grouped, field(&Args::kv_num_heads), 3, 2, "65535 is no multiple of kv_num_heads 2");
  expectEdge(good, field(&Args::seqlen_q), kLongest, kLongest + 1, "seqlen_q is 268435457");
  expectEdge(good, field(&Args::seqlen_kv), kMostKeys, kMostKeys + 1, "seqlen_kv is 16777217");
  expectEdge(good, field(&Args::batch), (INT64_C(1) << 29) - 1, INT64_C(1) << 29, "make 2147483648 blocks");
  expectEdge(packed, field(&Args::total_q), kMostTotal, kMostTotal + 1, "total_q is 2147483648");
  expectEdge(packed, field(&Args::total_kv), kMostTotal, kMostTotal + 1, "total_kv is 2147483648");
  expectEdge(paged, field(&Args::page_count), INT32_MAX, 0, "page_count is 0");
  expectEdge(paged, field(&Args::page_size), 16, 8, "page_size is 8");
  expectEdge(paged, field(&Args::page_size), 256, 512, "page_size is 512");
  std::function<void(Args&, int64_t)> const page_step = [](Args& a, int64_t x) { a.key.batch_stride = x; };
  std::function<void(Args&, int64_t)> const row_step = [](Args& a, int64_t x) { a.value.row_stride = x; };
  int64_t const step = INT64_C(1) << 30;
  expectEdge(paged, page_step, step - 1, step, "batch_stride of key is 1073741824");
  expectEdge(paged, page_step, 0, -1, "batch_stride of key is -1");
  expectEdge(paged, row_step, step - 1, step, "row_stride of value is 1073741824");
  expectEdge(paged, row_step, 0, -1, "row_stride of value is -1");
}

TEST(every_limit_of_an_append_is_where_the_header_says) {
  using Args = FlashAppendArgs;
  Args const good = goodAppend();
  Args packed = good, paged = good;
  packed.cu_seqlens_new = kNumbers;
  paged.page_table = kNumbers;
  paged.page_size = 16;
  expectEdge(good, field(&Args::head_dim), 256, 257, "head_dim is 257");
  expectEdge(good, field(&Args::v_head_dim), 1, 0, "v_head_dim is 0");
  expectEdge(good, field(&Args::kv_num_heads), 65535, 65536, "kv_num_heads is 65536");
  expectEdge(good, field(&Args::seqlen_new), kLongest, kLongest + 1, "seqlen_new is 268435457");
  expectEdge(good, field(&Args::capacity), kMostKeys, kMostKeys + 1, "capacity is 16777217");
  expectEdge(packed, field(&Args::total_new), kMostTotal, kMostTotal + 1, "total_new is 2147483648");
  expectEdge(paged, field(&Args::page_count), INT32_MAX, -1, "page_count is -1");
  Args many = good;
  many.kv_num_heads = 4;
  many.seqlen_new = kLongest;  // 2^30 rows a batch, four rows a block
  expectEdge(many, field(&Args::batch), 7, 8, "make 2147483648 blocks");
}

// The product of these sizes does not fit 64 bits.
TEST(sizes_that_overflow_are_refused_and_no_small_problem) {
  FlashAttentionArgs a = goodArgs();
  a.batch = INT32_MAX;
  a.q_num_heads = a.kv_num_heads = 65535;
  a.seqlen_q = kLongest;
  EXPECT(whyNot(a).find("a grid takes") != std::string::npos, whyNot(a));
  FlashAppendArgs append = goodAppend();
  append.batch = INT32_MAX;
  append.kv_num_heads = 65535;
  append.seqlen_new = kLongest;
  EXPECT(whyNot(append).find("a grid takes") != std::string::npos, whyNot(append));
}

TEST(the_workspace_of_any_numbers_is_small) {
  for (int32_t n : {INT32_MIN, -1, 0, 1, 65535, INT32_MAX}) {
    for (int64_t s : {INT64_MIN, INT64_C(-1), INT64_C(0), INT64_C(33), kLongest, INT64_MAX}) {
      FlashAttentionArgs a = goodArgs();
      a.batch = a.q_num_heads = a.v_head_dim = n;
      a.seqlen_q = a.seqlen_kv = s;
      size_t const bytes = flashAttentionWorkspace(&a);
      EXPECT(bytes <= size_t{5} << 20, n << ", " << s << ": " << bytes);
      EXPECT((bytes > 0) == (n > 0 && s > 32), n << ", " << s << ": " << bytes);
    }
  }
}

TEST(fields_of_forms_that_are_off_are_not_read) {
  Problem const problem;
  Tensors tensors(problem);
  FlashAttentionArgs a = tensors.args();
  a.page_size = INT32_MAX;
  a.page_count = -5;
  a.page_table_stride = a.total_q = a.total_kv = INT64_MIN;
  a.bias_dtype = 77;
  a.kv_lengths_stride = 7;
  a.sinks_stride = INT64_MIN;
  EXPECT(launch(a) == 0, flashEmulationError());
  EXPECT(tensors.judge().empty(), tensors.judge());
}

TEST(an_address_off_its_elements_is_refused) {
  auto const off = [](int bytes) { return reinterpret_cast<void*>(uintptr_t(64 + bytes)); };
  FlashAttentionArgs a = goodArgs();
  a.query.data = a.key.data = a.value.data = a.output.data = off(2);
  a.output.row_stride = 64;
  a.kv_lengths = static_cast<int32_t*>(off(4));
  EXPECT(whyNot(a).empty(), whyNot(a));
  for (FlashTensor FlashAttentionArgs::* t : {&FlashAttentionArgs::query, &FlashAttentionArgs::key,
                                              &FlashAttentionArgs::value, &FlashAttentionArgs::output}) {
    FlashAttentionArgs one = a;
    (one.*t).data = off(1);
    EXPECT(whyNot(one).find("data is no address of elements of 2 bytes") != std::string::npos, whyNot(one));
    EXPECT(launch(one) == 1);
  }
  a.bias = off(2);
  a.bias_dtype = kFlashFloat16;
  EXPECT(whyNot(a).empty(), whyNot(a));
  a.bias_dtype = kFlashFloat32;
  EXPECT(whyNot(a).find("bias is no address of elements of 4 bytes") == 0, whyNot(a));
  a.bias = nullptr;
  a.lse = static_cast<float*>(off(2));
  EXPECT(whyNot(a).find("lse is no address") == 0, whyNot(a));
  FlashAppendArgs append = goodAppend();
  append.key_cache.data = off(1);
  append.lengths_after = static_cast<int32_t*>(off(2));
  EXPECT(whyNot(append).find("key_cache.data is no address") == 0, whyNot(append));
  EXPECT(whyNot(append).find("lengths_after is no address") != std::string::npos, whyNot(append));
}

TEST(a_workspace_off_its_floats_is_refused_and_not_touched) {
  Problem problem;
  problem.seqlen_q = 2;
  problem.seqlen_kv = 700;
  Tensors tensors(problem);
  FlashAttentionArgs const a = tensors.args();
  std::vector<float> workspace(flashAttentionWorkspace(&a) / sizeof(float) + 1, 5.0f);
  for (int off : {1, 2, 3}) {
    EXPECT(flashAttentionLaunch(&a, reinterpret_cast<char*>(workspace.data()) + off, nullptr) == 1, off);
  }
  for (float x : workspace) EXPECT(x == 5.0f, x);
  EXPECT(flashAttentionLaunch(&a, workspace.data() + 1, nullptr) == 0, flashEmulationError());
  EXPECT(tensors.judge().empty(), tensors.judge());
}

namespace {

// The address of the last step along an axis, and a step back.
void turnRound(FlashTensor& t, int64_t FlashTensor::* axis, int64_t steps, int64_t bytes) {
  t.data = static_cast<char*>(t.data) + (steps - 1) * (t.*axis) * bytes;
  t.*axis = -(t.*axis);
}

}  // namespace

// Both ends of every axis change places, of inputs and output alike: the keys come in reverse.
TEST(negative_strides_are_followed) {
  for (FlashDtype dtype : {kFlashFloat16, kFlashFloat32}) {
    Problem p;
    p.dtype = dtype;
    p.batch = 2;
    p.heads_q = p.heads_kv = 2;
    p.wants_lse = false;
    Tensors backward(p);
    FlashAttentionArgs a = backward.args();
    for (FlashTensor* t : {&a.query, &a.key, &a.value, &a.output}) {
      bool const keys = t == &a.key || t == &a.value;
      turnRound(*t, &FlashTensor::row_stride, keys ? p.seqlen_kv : p.seqlen_q, bytesOf(dtype));
      turnRound(*t, &FlashTensor::head_stride, p.heads_q, bytesOf(dtype));
      turnRound(*t, &FlashTensor::batch_stride, p.batch, bytesOf(dtype));
    }
    EXPECT(!flash_export::kernels::variantFor(a).general() || dtype == kFlashFloat32);
    EXPECT(launch(a) == 0, flashEmulationError());
    EXPECT(backward.judge().empty(), backward.judge());
  }
}

// A stride that is forgotten is 0, and one that forgets the heads too small.
TEST(a_stride_that_puts_written_rows_onto_one_another_is_refused) {
  Problem p;
  p.batch = p.heads_q = p.heads_kv = 2;
  Tensors tensors(p);
  FlashAttentionArgs const good = tensors.args();
  EXPECT(whyNot(good).empty(), whyNot(good));
  std::vector<unsigned char> cache(1 << 16);
  FlashAppendArgs append = goodAppend();
  append.batch = append.kv_num_heads = 2;
  append.key_cache = {cache.data(), 100 * 128, 64, 128};
  append.value_cache = {cache.data() + 16, 100 * 128, 64, 128};
  EXPECT(whyNot(append).empty(), whyNot(append));
  std::pair<int64_t FlashTensor::*, char const*> const strides[] = {
      {&FlashTensor::row_stride, "row_stride"},
      {&FlashTensor::head_stride, "head_stride"},
      {&FlashTensor::batch_stride, "batch_stride"}};
  for (auto const& [stride, name] : strides) {
    for (int64_t const step : {0, 1, -1, p.v_head_dim - 1, 1 - p.v_head_dim}) {
      FlashAttentionArgs a = good;
      a.output.*stride = step;
      std::string const words = std::string(name) + " of output puts rows of " + std::to_string(p.v_head_dim);
      EXPECT(whyNot(a).find(words) == 0, "'" << whyNot(a) << "' for " << step);
      EXPECT(launch(a) == 1);
    }
    for (FlashTensor FlashAppendArgs::* t : {&FlashAppendArgs::key_cache, &FlashAppendArgs::value_cache}) {
      FlashAppendArgs a = append;
      a.*t.*stride = 63;
      EXPECT(whyNot(a).find(std::string(name) + " of ") == 0, "'" << whyNot(a) << "'");
      EXPECT(launch(a) == 1);
    }
  }
  append.value_cache.data = append.key_cache.data;
  EXPECT(whyNot(append).find("begin at one address") != std::string::npos, whyNot(append));
  // The stride of an axis of one step is never used, nor any of a tensor without rows.
  FlashAttentionArgs one = goodArgs(), none = good;
  one.output = {cache.data(), 0, 0, 64};
  EXPECT(whyNot(one).empty(), whyNot(one));
  none.seqlen_q = 0;
  none.output.batch_stride = 0;
  EXPECT(whyNot(none).empty(), whyNot(none));
}

TEST(a_stride_of_0_repeats_an_input_along_its_axis) {
  Problem p;
  p.batch = 2;
  p.heads_q = p.heads_kv = 2;
  p.wants_lse = false;
  Tensors repeated(p), copied(p);
  for (int i = 0; i < p.seqlen_kv * p.head_dim; ++i) {
    int const row = i / p.head_dim, d = i % p.head_dim;
    for (int b = 0; b < p.batch; ++b) {
      for (int h = 0; h < p.heads_kv; ++h) {
        copied.setKey(b, h, row, d, copied.key(0, 0, 0, d));
        copied.setValue(b, h, row, d, copied.value(0, 0, row, d));
      }
    }
  }
  FlashAttentionArgs a = repeated.args();
  a.key.batch_stride = a.key.head_stride = a.key.row_stride = 0;
  a.value.batch_stride = a.value.head_stride = 0;
  EXPECT(launch(a) == 0, flashEmulationError());
  EXPECT(launch(copied.args()) == 0, flashEmulationError());
  for (int i = 0; i < p.batch * p.heads_q * p.seqlen_q; ++i) {
    int const b = i / (p.heads_q * p.seqlen_q), h = i / p.seqlen_q % p.heads_q, row = i % p.seqlen_q;
    EXPECT(repeated.output(b, h, row, 5) == copied.output(b, h, row, 5), b << ", " << h << ", " << row);
  }
}

TEST(null_data_that_has_elements_is_an_error_and_no_crash) {
  for (FlashTensor FlashAttentionArgs::* t : {&FlashAttentionArgs::query, &FlashAttentionArgs::key,
                                              &FlashAttentionArgs::value, &FlashAttentionArgs::output}) {
    Tensors tensors{Problem{}};
    FlashAttentionArgs a = tensors.args();
    (a.*t).data = nullptr;
    EXPECT(whyNot(a).empty(), whyNot(a));
    EXPECT(launch(a) == 1);
  }
}
