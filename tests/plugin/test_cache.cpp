// SPDX-License-Identifier: Apache-2.0
// The cache forms: what TensorRT is told of them and what the kernels are given; the kernels are
// fake_kernels.h. Their numbers are judged by test_cache_plugin.py.
#include <cstring>
#include <random>

#include "fake_kernels.h"
#include "host.h"
#include "runner.h"

namespace {

using namespace nvinfer1;
using host::desc;

constexpr DataType kInt = DataType::kINT32;
constexpr size_t kBias = 3;

void* address(intptr_t number) { return reinterpret_cast<void*>(number << 12); }

host::Fields fields(int32_t layout) {
  return host::Fields()
      .set("layout", layout)
      .set("q_num_heads", 6)
      .set("kv_num_heads", 2)
      .set("has_kv_lengths", 1);
}

// B 2, Sq 7, Sn 3, D 8, Dv 5; a cache of 48 keys, or of pages of 16 of which each batch has 3. The caches'
// outputs have their inputs' memory, as a host gives it that aliases them.
struct Call {
  host::PluginPtr plugin;
  std::vector<PluginTensorDesc> in, out;
  std::vector<void const*> inputs;
  std::vector<void*> outputs;

  Call(bool paged, int32_t layout)
      : plugin(host::create(paged ? "FlashAttentionPagedCache" : "FlashAttentionCache", fields(layout))) {
    fake::kernels = {};
    int64_t const outer = paged ? 9 : 2, rows = paged ? 16 : 48;
    bool const first = layout == 1;
    in = {first ? desc({2, 6, 7, 8}) : desc({2, 7, 48}),
          first ? desc({2, 2, 3, 8}) : desc({2, 3, 16}),
          first ? desc({2, 2, 3, 5}) : desc({2, 3, 10}),
          desc({1, 1, 1, 1}),
          desc({2}, kInt),
          desc({1}),
          first ? desc({outer, 2, rows, 8}) : desc({outer, rows, 16}),
          first ? desc({outer, 2, rows, 5}) : desc({outer, rows, 10})};
    if (paged) in.push_back(desc({2, 3}, kInt));
    out = {first ? desc({2, 6, 7, 5}) : desc({2, 7, 30}), desc({2, 6, 7}), desc({2}, kInt), in[6], in[7]};
    for (size_t i = 0; i < in.size(); ++i) inputs.push_back(address(1 + intptr_t(i)));
    outputs = {address(11), address(12), address(13), address(7), address(8)};
  }

  int32_t enqueue() {
    return host::runtime(plugin).enqueue(in.data(), out.data(), inputs.data(), outputs.data(), nullptr,
                                         static_cast<cudaStream_t>(address(99)));
  }
  int32_t shapeChange() {
    return host::runtime(plugin).onShapeChange(in.data(), int32_t(in.size()), out.data(), 5);
  }
};

bool strides(FlashTensor const& tensor, void* data, int64_t batch, int64_t head, int64_t row) {
  return tensor.data == data && tensor.batch_stride == batch && tensor.head_stride == head &&
         tensor.row_stride == row;
}

TEST(only_the_caches_outputs_are_aliased_and_only_cache_forms_show_the_capability_that_can) {
  for (char const* op : {"FlashAttentionCache", "FlashAttentionPagedCache"}) {
    host::PluginPtr const plugin = host::create(op, fields(0));
    auto& build = static_cast<IPluginV3OneBuildV2&>(host::build(plugin));
    InterfaceInfo const info = build.getInterfaceInfo();
    EXPECT(std::strcmp(info.kind, "PLUGIN_V3ONE_BUILD") == 0 && info.major == 2, info.major);
    int32_t const wanted[] = {-1, -1, -1, 6, 7};
    for (int32_t i = 0; i < 5; ++i) EXPECT(build.getAliasedInput(i) == wanted[i], i);
    EXPECT(host::runtime(plugin).getInterfaceInfo().major == 1);
  }
  for (char const* op : {"FlashAttention", "FlashAttentionEx", "FlashAttentionPacked"}) {
    host::PluginPtr const plugin = host::create(op, host::Fields());
    EXPECT(host::build(plugin).getInterfaceInfo().major == 1, op);
  }
}

TEST(a_cache_form_needs_lengths) {
  host::Messages messages;
  EXPECT(host::create("FlashAttentionCache", fields(0).set("has_kv_lengths", 0)) == nullptr);
  EXPECT(messages.has("attribute has_kv_lengths\n  got   0"), messages.take());
}

TEST(the_outputs_types_and_shapes_are_the_inputs) {
  host::PluginPtr const plugin = host::create("FlashAttentionPagedCache", fields(0));
  DataType const half = DataType::kHALF;
  DataType const types[] = {half, half, half, half, kInt, DataType::kFLOAT, half, half, kInt};
  DataType got[5];
  EXPECT(host::build(plugin).getOutputDataTypes(got, 5, types, 9) == 0);
  EXPECT(got[0] == half && got[1] == DataType::kFLOAT && got[2] == kInt && got[3] == half && got[4] == half);

  host::Expressions expressions;
  std::vector<DimsExprs> inputs;
  std::vector<std::vector<std::string>> const given = {
      {"B", "S", "48"}, {"B", "N", "16"}, {"B", "N", "10"}, {"1", "1", "1", "1"}, {"B"}, {"1"},
      {"P", "T", "16"}, {"P", "T", "10"}, {"B", "W"}};
  for (auto const& axes : given) inputs.push_back(expressions.shape(axes));
  DimsExprs outputs[5];
  EXPECT(host::build(plugin).getOutputShapes(inputs.data(), 9, nullptr, 0, outputs, 5, expressions) == 0);
  std::string text;
  for (DimsExprs const& shape : outputs) text += host::Expressions::text(shape);
  EXPECT(text == "[B, S, 30][B, 6, S][B][P, T, 16][P, T, 10]", text);
}

TEST(the_append_comes_first_and_its_lengths_are_attended_with) {
  Call call(false, 0);
  host::Messages messages;
  EXPECT(call.shapeChange() == 0 && call.enqueue() == 0, messages.take());
  EXPECT(fake::kernels.appends == 1 && fake::kernels.launches == 1 &&
         fake::kernels.launch_stream == address(99));
  FlashAppendArgs const& append = fake::kernels.append;
  EXPECT(append.batch == 2 && append.kv_num_heads == 2 && append.head_dim == 8 && append.v_head_dim == 5);
  EXPECT(append.seqlen_new == 3 && append.capacity == 48 && append.page_table == nullptr);
  EXPECT(strides(append.key, address(2), 3 * 16, 8, 16) && strides(append.value, address(3), 3 * 10, 5, 10));
  EXPECT(strides(append.key_cache, address(7), 48 * 16, 8, 16));
  EXPECT(strides(append.value_cache, address(8), 48 * 10, 5, 10));
  EXPECT(append.kv_lengths == address(5) && append.kv_lengths_stride == 1);
  EXPECT(append.lengths_after == address(13));

  FlashAttentionArgs const& args = fake::kernels.args;
  EXPECT(args.batch == 2 && args.seqlen_q == 7 && args.seqlen_kv == 48 && args.page_table == nullptr);
  EXPECT(strides(args.key, address(7), 48 * 16, 8, 16) && strides(args.value, address(8), 48 * 10, 5, 10));
  EXPECT(args.kv_lengths == address(13) && args.kv_lengths_stride == 1 && args.lse == address(12));
}

TEST(a_paged_cache_is_found_by_its_table_and_one_length_may_stand_for_all) {
  Call call(true, 1);
  call.in[4] = desc({1}, kInt);
  host::Messages messages;
  EXPECT(call.shapeChange() == 0 && call.enqueue() == 0, messages.take());
  FlashAppendArgs const& append = fake::kernels.append;
  EXPECT(append.page_size == 16 && append.page_count == 9 && append.capacity == 48);
  EXPECT(append.page_table == address(9) && append.page_table_stride == 3);
  EXPECT(append.kv_lengths_stride == 0);
  EXPECT(strides(append.key_cache, address(7), 2 * 16 * 8, 16 * 8, 8));
  FlashAttentionArgs const& args = fake::kernels.args;
  EXPECT(args.page_size == 16 && args.page_count == 9 && args.seqlen_kv == 48);
  EXPECT(args.page_table == address(9) && args.page_table_stride == 3 && args.kv_lengths_stride == 1);
  EXPECT(strides(args.value, address(8), 2 * 16 * 5, 16 * 5, 5));
}

TEST(a_host_that_does_not_alias_is_refused_before_anything_is_written) {
  for (int32_t output : {3, 4}) {
    Call call(false, 0);
    host::Messages messages;
    call.outputs[output] = address(77);
    EXPECT(call.enqueue() != 0);
    EXPECT(messages.has("kALIASED_PLUGIN_IO_10_03"), messages.take());
    EXPECT(fake::kernels.appends == 0 && fake::kernels.launches == 0);
  }
}

TEST(without_queries_the_keys_are_still_appended) {
  Call call(false, 1);
  call.in[0] = desc({2, 6, 0, 8});
  call.out[0] = desc({2, 6, 0, 5});
  call.out[1] = desc({2, 6, 0});
  call.inputs[0] = nullptr;
  call.outputs[0] = call.outputs[1] = nullptr;
  host::Messages messages;
  EXPECT(call.enqueue() == 0, messages.take());
  EXPECT(fake::kernels.appends == 1 && fake::kernels.launches == 0);
}

TEST(a_failed_append_is_told_and_nothing_attends) {
  Call call(true, 0);
  host::Messages messages;
  fake::kernels.status = 719;
  EXPECT(call.enqueue() != 0);
  EXPECT(messages.has("CUDA error 719"), messages.take());
  EXPECT(fake::kernels.launches == 0);
  fake::kernels.status = 1;
  fake::kernels.reason = "page_size is 16; never on Mondays";
  EXPECT(call.enqueue() != 0);
  EXPECT(messages.has("got   page_size is 16; never on Mondays"), messages.take());
}

struct Wrong {
  size_t tensor;
  PluginTensorDesc desc;
  char const* text;
};

void expectRefused(bool paged, Wrong const& wrong) {
  host::Messages messages;
  Call call(paged, 0);
  if (wrong.tensor == kBias) call.plugin = host::create("FlashAttentionCache", fields(0).set("has_bias", 1));
  size_t const inputs = call.in.size();
  (wrong.tensor < inputs ? call.in[wrong.tensor] : call.out[wrong.tensor - inputs]) = wrong.desc;
  EXPECT(call.shapeChange() != 0, wrong.text);
  EXPECT(messages.has(wrong.text), messages.take());
  EXPECT(call.enqueue() != 0, wrong.text);
  EXPECT(fake::kernels.appends == 0 && fake::kernels.launches == 0, wrong.text);
}

TEST(every_tensor_that_does_not_fit_is_refused_by_name) {
  for (Wrong const& wrong : {
           Wrong{1, desc({1, 3, 16}), "tensor key\n  got   batch 1, head dim 8"},
           Wrong{1, desc({2, 3, 18}), "tensor key\n  got   batch 2, head dim 9"},
           Wrong{2, desc({2, 4, 10}), "tensor value\n  got   sequence 4"},
           Wrong{2, desc({2, 3, 12}), "tensor value\n  got   batch 2, head dim 6"},
           Wrong{3, desc({1, 1, 1, 40}), "tensor bias\n  got   shape [1, 1, 1, 40]"},
           Wrong{4, desc({3}, kInt), "tensor kv_lengths\n  got   shape [3]"},
           Wrong{6, desc({3, 48, 16}), "tensor key_cache\n  got   batch 3"},
           Wrong{6, desc({2, 48, 16}, DataType::kHALF), "tensor key_cache\n  got   fp16"},
           Wrong{7, desc({2, 47, 10}), "tensor value_cache\n  got   batch 2, sequence 47"},
           Wrong{8 + 2, desc({1}, kInt), "tensor kv_lengths_out\n  got   shape [1]"},
           Wrong{8 + 2, desc({2}, DataType::kINT64), "tensor kv_lengths_out\n  got   int64"},
           Wrong{8 + 3, desc({2, 49, 16}), "tensor key_cache_out\n  got   shape [2, 49, 16]"},
           Wrong{8 + 4, desc({2, 48, 10}, DataType::kHALF), "tensor value_cache_out\n  got   fp16"},
       }) {
    expectRefused(false, wrong);
  }
  for (Wrong const& wrong : {
           Wrong{8, desc({1, 3}, kInt), "tensor page_table\n  got   shape [1, 3]"},
           Wrong{8, desc({2, 3}), "tensor page_table\n  got   fp32"},
           Wrong{7, desc({8, 16, 10}), "tensor value_cache\n  got   batch 8, sequence 16"},
       }) {
    expectRefused(true, wrong);
  }
}

TEST(a_null_address_is_refused_by_name) {
  for (bool paged : {false, true}) {
    size_t const count = paged ? 9 : 8;
    for (size_t i = 0; i < count; ++i) {
      if (i == 3 || i == 5) continue;  // Off: never read.
      Call call(paged, 0);
      host::Messages messages;
      call.inputs[i] = nullptr;
      EXPECT(call.enqueue() != 0, i);
      EXPECT(messages.has("a null address"), messages.take());
    }
  }
}

TEST(bounds_of_a_profile_agree_in_the_new_axes_too) {
  for (bool paged : {false, true}) {
    Call call(paged, 0);
    host::Messages messages;
    std::vector<DynamicPluginTensorDesc> in = host::dynamic(call.in);
    std::vector<DynamicPluginTensorDesc> const out = host::dynamic(call.out);
    in[0].max = host::dims({4, 9, 48});
    in[1].max = host::dims({8, 5, 16});
    in[2].max = host::dims({6, 4, 10});
    in[6].max = paged ? host::dims({30, 16, 16}) : host::dims({5, 96, 16});
    in[7].max = paged ? host::dims({20, 16, 10}) : host::dims({9, 80, 10});
    if (paged) in[8].max = host::dims({7, 6});
    fake::kernels.workspace = 123;
    auto const nbIn = static_cast<int32_t>(in.size());
    EXPECT(host::build(call.plugin).configurePlugin(in.data(), nbIn, out.data(), 5) == 0, messages.take());
    EXPECT(host::build(call.plugin).getWorkspaceSize(in.data(), nbIn, out.data(), 5) == 123, messages.take());
    FlashAttentionArgs const& args = fake::kernels.args;
    EXPECT(args.batch == 4 && args.seqlen_q == 9 && args.seqlen_kv == (paged ? 96 : 80), args.seqlen_kv);
    EXPECT(!paged || args.page_count == 20, args.page_count);
  }
}

TEST(random_descriptions_of_caches_are_refused_or_run_but_never_crash) {
  host::Messages messages;
  std::mt19937 random(20261130);
  int ran = 0;
  for (int trial = 0; trial < 10000; ++trial) {
    Call call(trial % 2 == 0, trial % 3 == 0 ? 1 : 0);
    size_t const which = random() % (call.in.size() + call.out.size());
    PluginTensorDesc& tensor = which < call.in.size() ? call.in[which] : call.out[which - call.in.size()];
    int64_t const sizes[] = {-1, 0, 1, 2, 3, 16, 48, INT32_MAX, INT64_MAX, INT64_MIN};
    int32_t const ranks[] = {-1, 0, 1, 2, 3, 4, 5, 8, 9, 1000};
    if (random() % 3 == 0) {
      tensor.dims.nbDims = ranks[random() % 10];
    } else {
      tensor.dims.d[random() % 4] = sizes[random() % 10];
    }
    int32_t const status = call.enqueue();
    EXPECT((status == 0) == messages.take().empty(), "trial " << trial);
    ran += fake::kernels.appends;
  }
  EXPECT(ran > 0 && ran < 5000, ran);
}

}  // namespace
