// SPDX-License-Identifier: Apache-2.0
// The door: what it refuses, and in which words; which kernel it takes; problems with nothing in them.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "../runner.h"
#include "dispatch.h"
#include "emulation/launch_emulated.h"
#include "problem.h"

using namespace kernel_tests;
using flash_export::kernels::Features;
using flash_export::kernels::kMaxKeys;
using flash_export::kernels::kMaxSplitBlocks;
using flash_export::kernels::kMaxSplitRows;
using flash_export::kernels::kVariants;
using flash_export::kernels::Plan;
using flash_export::kernels::planFor;
using flash_export::kernels::Variant;
using flash_export::kernels::variantFor;

namespace {

using Change = std::function<void(FlashAttentionArgs&)>;

FlashAttentionArgs goodArgs() {
  FlashAttentionArgs a{};
  a.dtype = kFlashFloat16;
  a.batch = 2;
  a.q_num_heads = 4;
  a.kv_num_heads = 2;
  a.head_dim = a.v_head_dim = 64;
  a.seqlen_q = a.seqlen_kv = 100;
  a.query = a.output = {nullptr, 25600, 64, 256};
  a.key = a.value = {nullptr, 12800, 64, 128};
  a.scale = 0.125f;
  a.window_left = a.window_right = -1;
  return a;
}

int32_t const kNoTable = 0;
float const kNoSink = 0.0f;

void page(FlashAttentionArgs& a) {
  a.page_table = &kNoTable;
  a.page_size = 16;
  a.page_count = 3;
}

std::string whyNot(Change const& change) {
  FlashAttentionArgs a = goodArgs();
  change(a);
  char text[2048];
  int const reasons = flashAttentionWhyUnsupported(&a, text, sizeof text);
  EXPECT((reasons == 0) == (text[0] == '\0'), reasons << " reasons, text: " << text);
  if (reasons > 0) EXPECT(flashAttentionLaunch(&a, nullptr, nullptr) == 1, "a refused problem was launched");
  return text;
}

void expectRefused(Change const& change, char const* words) {
  std::string const text = whyNot(change);
  EXPECT(text.find(words) != std::string::npos, "'" << text << "' lacks '" << words << "'");
}

}  // namespace

TEST(a_good_problem_is_not_refused_and_needs_no_pointers_to_be_judged) {
  EXPECT(whyNot([](FlashAttentionArgs&) {}).empty());
}

TEST(bad_arguments_are_refused_with_their_numbers) {
  expectRefused([](auto& a) { a.dtype = 7; }, "dtype is 7; the kernels take 0 to 2.");
  expectRefused([](auto& a) { a.batch = -1; }, "batch is -1");
  expectRefused([](auto& a) { a.q_num_heads = 0; }, "q_num_heads is 0");
  expectRefused([](auto& a) { a.q_num_heads = 5; }, "q_num_heads 5 is no multiple of kv_num_heads 2.");
  expectRefused([](auto& a) { a.kv_num_heads = 0; }, "kv_num_heads is 0");
  expectRefused([](auto& a) { a.head_dim = 257; }, "head_dim is 257; the kernels take 1 to 256.");
  expectRefused([](auto& a) { a.head_dim = 0; }, "head_dim is 0");
  expectRefused([](auto& a) { a.v_head_dim = 300; }, "v_head_dim is 300");
  expectRefused([](auto& a) { a.seqlen_q = -4; }, "seqlen_q is -4");
  expectRefused([](auto& a) { a.seqlen_kv = kMaxKeys + 1; }, "seqlen_kv is 16777217");
  expectRefused([](auto& a) { a.scale = std::nanf(""); }, "scale is nan");
  expectRefused([](auto& a) { a.scale = std::numeric_limits<float>::infinity(); }, "scale is inf");
  expectRefused([](auto& a) { a.softcap = -1.0f; }, "softcap is -1");
  expectRefused([](auto& a) { a.causal = 2; }, "causal is 2");
  expectRefused([](auto& a) { a.diagonal = -1; }, "diagonal is -1");
  expectRefused([](auto& a) { a.window_left = -2; }, "window_left is -2");
  expectRefused([](auto& a) { a.window_right = -2; }, "window_right is -2");
  expectRefused([](auto& a) { a.reserved = 1; }, "reserved is 1");
  expectRefused(
      [](auto& a) {
        a.kv_lengths = &kNoTable;
        a.kv_lengths_stride = 2;
      },
      "kv_lengths_stride is 2");
  expectRefused(
      [](auto& a) {
        a.sinks = &kNoSink;
        a.sinks_stride = -1;
      },
      "sinks_stride is -1");
  expectRefused(
      [](auto& a) {
        a.bias = &a;
        a.bias_dtype = kFlashBFloat16;
      },
      "bias has dtype 2 beside a query of dtype 1");
  expectRefused(
      [](auto& a) {
        page(a);
        a.page_size = 48;
      },
      "page_size is 48; the kernels take powers of 2 from 16 to 256.");
  expectRefused(
      [](auto& a) {
        page(a);
        a.page_size = 8;
      },
      "page_size is 8");
  expectRefused(
      [](auto& a) {
        page(a);
        a.page_size = 512;
      },
      "page_size is 512");
  expectRefused(
      [](auto& a) {
        page(a);
        a.page_size = INT32_MIN;
      },
      "page_size is -2147483648");
  expectRefused(
      [](auto& a) {
        page(a);
        a.page_count = 0;
      },
      "page_count is 0; the kernels take 1 to");
  expectRefused(
      [](auto& a) {
        page(a);
        a.value.batch_stride = int64_t{1} << 30;
      },
      "batch_stride of value is 1073741824");
  expectRefused(
      [](auto& a) {
        page(a);
        a.key.row_stride = -1;
      },
      "row_stride of key is -1");
  expectRefused(
      [](auto& a) {
        page(a);
        a.cu_seqlens_kv = a.page_table;
      },
      "cu_seqlens_kv is given beside page_table");
  expectRefused(
      [](auto& a) {
        a.cu_seqlens_q = &kNoTable;
        a.total_q = -1;
      },
      "total_q is -1");
  expectRefused(
      [](auto& a) {
        a.cu_seqlens_kv = &kNoTable;
        a.total_kv = int64_t{1} << 31;
      },
      "total_kv is 2147483648");
  expectRefused(
      [](auto& a) {
        a.batch = 1 << 20;
        a.seqlen_q = 1 << 20;
      },
      "a grid takes 2147483647");
}

TEST(several_reasons_come_one_a_line_and_a_short_buffer_is_terminated) {
  FlashAttentionArgs a = goodArgs();
  a.head_dim = 0;
  a.causal = 5;
  char text[512];
  EXPECT(flashAttentionWhyUnsupported(&a, text, sizeof text) == 2);
  EXPECT(std::strchr(text, '\n') != nullptr && std::strchr(text, '\n') == std::strrchr(text, '\n'), text);
  char small[8];
  std::memset(small, 'x', sizeof small);
  EXPECT(flashAttentionWhyUnsupported(&a, small, sizeof small) == 2);
  EXPECT(std::strlen(small) == 7);
  EXPECT(flashAttentionWhyUnsupported(&a, nullptr, 0) == 2);
}

TEST(a_problem_with_no_rows_touches_no_pointer) {
  for (Change const& change :
       {Change([](auto& a) { a.batch = 0; }), Change([](auto& a) { a.seqlen_q = 0; })}) {
    FlashAttentionArgs a = goodArgs();
    change(a);
    EXPECT(flashAttentionLaunch(&a, nullptr, nullptr) == 0);
  }
}

TEST(packed_sequences_without_any_row_touch_no_pointer) {
  FlashAttentionArgs a = goodArgs();
  a.cu_seqlens_q = &kNoTable;
  EXPECT(flashAttentionLaunch(&a, nullptr, nullptr) == 0);
}

TEST(missing_pointers_are_an_error_and_no_crash) {
  FlashAttentionArgs a = goodArgs();
  EXPECT(flashAttentionLaunch(&a, nullptr, nullptr) == 1);
}

TEST(rows_without_keys_need_no_key_pointers) {
  Problem p;
  p.seqlen_kv = 0;
  Tensors tensors(p);
  FlashAttentionArgs a = tensors.args();
  a.key.data = a.value.data = nullptr;
  EXPECT(flashAttentionLaunch(&a, nullptr, nullptr) == 0);
  EXPECT(tensors.judge().empty(), tensors.judge());
}

TEST(the_workspace_never_shrinks_as_a_problem_grows) {
  Change const grow[] = {
      [](auto& a) { a.batch *= 2; },      [](auto& a) { a.q_num_heads *= 2; },
      [](auto& a) { a.seqlen_q *= 3; },   [](auto& a) { a.seqlen_kv *= 5; },
      [](auto& a) { a.v_head_dim *= 2; }, [](auto& a) { a.head_dim *= 2; },
  };
  FlashAttentionArgs a = goodArgs();
  a.seqlen_q = a.v_head_dim = a.head_dim = 1;
  a.seqlen_kv = 7;
  EXPECT(flashAttentionWorkspace(&a) == 0, "one tile of keys is never split");
  size_t before = 0;
  for (int round = 0; round < 7; ++round) {
    for (Change const& change : grow) {
      change(a);
      size_t const bytes = flashAttentionWorkspace(&a);
      EXPECT(bytes >= before, before << " became " << bytes);
      before = bytes;
    }
  }
  EXPECT(before > 0 && before <= size_t(kMaxSplitBlocks) * kMaxSplitRows * 258 * 4, before);
}

TEST(every_plan_fits_the_workspace) {
  for (int number = 0; number < 6 * 4 * 3 * 2 * 3 * 6 * 4; ++number) {
    int left = number;
    auto const one = [&left](std::initializer_list<int> choices) {
      int const chosen = choices.begin()[left % int(choices.size())];
      left /= int(choices.size());
      return chosen;
    };
    FlashAttentionArgs a = goodArgs();
    a.seqlen_q = one({1, 2, 5, 16, 17, 300});
    a.seqlen_kv = one({1, 33, 500, 70000});
    a.q_num_heads = one({1, 6, 64});
    a.kv_num_heads = one({1, a.q_num_heads});
    a.batch = one({1, 7, 200});
    a.dtype = one({kFlashFloat32, kFlashFloat16, kFlashBFloat16});  // fp32 and 256 have the smallest tiles
    a.head_dim = a.v_head_dim = one({64, 256});
    Plan const plan = planFor(a, true, one({1, 40, 108, 188}));
    size_t const rows = size_t(plan.splits) * size_t(a.batch) * size_t(a.q_num_heads) * size_t(a.seqlen_q);
    size_t const bytes = rows * size_t(a.v_head_dim + 2) * sizeof(float);
    EXPECT(plan.splits == 1 || bytes <= flashAttentionWorkspace(&a),
           plan.splits << " splits of " << rows << " rows");
  }
}

TEST(decoding_is_packed_and_split_and_long_problems_are_not) {
  FlashAttentionArgs a = goodArgs();
  a.batch = 1;
  a.seqlen_q = 1;
  a.seqlen_kv = 4096;
  Plan const decode = planFor(a, true, 108);
  EXPECT(decode.pack == 2 && decode.splits > 8, decode.splits);
  EXPECT(planFor(a, false, 108).splits == 1, "without a workspace");
  a.seqlen_q = 4096;
  Plan const prefill = planFor(a, true, 108);
  EXPECT(prefill.pack == 1 && prefill.splits == 1);
}

TEST(every_variant_serves_its_own_head_dim) {
  for (Variant const& v : kVariants) {
    FlashAttentionArgs a = goodArgs();
    a.dtype = v.dtype;
    a.head_dim = 1 + v.head_dim / 2;
    a.v_head_dim = v.head_dim;
    if (v.general()) {
      a.softcap = 1.0f;
    } else {
      a.head_dim = v.head_dim;
    }
    if (v.features == Features::kPaged) page(a);
    EXPECT(std::string(variantFor(a).name) == v.name, variantFor(a).name << " serves " << v.name);
  }
}

TEST(what_a_plain_kernel_cannot_do_goes_to_a_general_one) {
  EXPECT(!variantFor(goodArgs()).general());
  Change const changes[] = {
      [](auto& a) { a.softcap = 2.0f; },
      [](auto& a) { a.bias = &a; },
      [](auto& a) { a.scale = -0.5f; },
      [](auto& a) { a.scale = 0.0f; },
      [](auto& a) { a.head_dim = 60; },
      [](auto& a) { a.v_head_dim = 33; },
      [](auto& a) { a.query.row_stride = 257; },
      [](auto& a) { a.key.head_stride = 68; },
      [](auto& a) { a.value.batch_stride = 12801; },
      [](auto& a) { a.output.data = reinterpret_cast<void*>(8); },
  };
  for (Change const& change : changes) {
    FlashAttentionArgs a = goodArgs();
    change(a);
    EXPECT(variantFor(a).general(), "change " << &change - changes << " is served by " << variantFor(a).name);
  }
}

TEST(a_paged_cache_goes_to_a_paged_kernel_and_packed_sequences_to_a_plain_one) {
  FlashAttentionArgs a = goodArgs();
  page(a);
  EXPECT(std::string(variantFor(a).name) == "Half64Paged", variantFor(a).name);
  a.key.batch_stride = 12801;
  EXPECT(variantFor(a).general(), "pages that start off 16 bytes");
  a = goodArgs();
  a.cu_seqlens_q = a.cu_seqlens_kv = &kNoTable;
  a.total_q = a.total_kv = 100;
  a.query.batch_stride = a.key.batch_stride = 1;  // never taken
  EXPECT(std::string(variantFor(a).name) == "Half64Plain", variantFor(a).name);
}

TEST(the_stride_of_an_axis_of_one_step_decides_nothing) {
  FlashAttentionArgs a = goodArgs();
  a.batch = 1;
  a.query.batch_stride = 1;
  EXPECT(!variantFor(a).general());
}
