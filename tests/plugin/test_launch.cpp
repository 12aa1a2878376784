// SPDX-License-Identifier: Apache-2.0
// What the plugin hands to the kernels and makes of their answers; the kernels are fake_kernels.h.
#include <cstdint>
#include <random>
#include <vector>

#include "fake_kernels.h"
#include "host.h"
#include "runner.h"

namespace {

using namespace nvinfer1;
using host::desc;

// A node with 6 query heads, 2 key and value heads and its tensors: B 2, Sq 7, Skv 9, D 8, Dv 5.
struct Call {
  host::PluginPtr plugin;
  std::vector<PluginTensorDesc> in, out;
  std::vector<void const*> inputs;
  std::vector<void*> outputs;

  int32_t enqueue(void* workspace = nullptr, cudaStream_t stream = nullptr) {
    return host::runtime(plugin).enqueue(in.data(), out.data(), inputs.data(), outputs.data(), workspace,
                                         stream);
  }
};

void* address(intptr_t number) { return reinterpret_cast<void*>(number << 12); }

Call prepare(char const* op, int32_t layout, std::vector<PluginTensorDesc> in,
             std::vector<PluginTensorDesc> out) {
  fake::kernels = {};
  host::Fields fields;
  fields.set("layout", layout)
      .set("q_num_heads", 6)
      .set("kv_num_heads", 2)
      .set("causal", 1)
      .set("window_left", 3);
  fields.set("diagonal", 1).set("scale", 0.25).set("softcap", 7).set("window_right", 4);
  if (in.size() == 6) fields.set("has_bias", 1).set("has_kv_lengths", 1).set("has_sinks", 1);
  Call call{host::create(op, fields), std::move(in), std::move(out), {}, {}};
  for (size_t i = 0; i < call.in.size(); ++i) call.inputs.push_back(address(1 + i));
  for (size_t i = 0; i < call.out.size(); ++i) call.outputs.push_back(address(11 + i));
  return call;
}

Call plainCall() {
  return prepare("FlashAttention", 0, {desc({2, 7, 48}), desc({2, 9, 16}), desc({2, 9, 10})},
                 {desc({2, 7, 30})});
}

Call exCall() {
  return prepare("FlashAttentionEx", 1,
                 {desc({2, 6, 7, 8}), desc({2, 2, 9, 8}), desc({2, 2, 9, 5}), desc({1, 6, 1, 9}),
                  desc({2}, DataType::kINT32), desc({6})},
                 {desc({2, 6, 7, 5}), desc({2, 6, 7})});
}

void expectTensor(FlashTensor const& tensor, void* data, int64_t batch, int64_t head, int64_t row) {
  EXPECT(tensor.data == data, tensor.data << " for " << data);
  EXPECT(tensor.batch_stride == batch && tensor.head_stride == head && tensor.row_stride == row,
         tensor.batch_stride << ' ' << tensor.head_stride << ' ' << tensor.row_stride);
}

TEST(the_kernels_get_heads_last_tensors) {
  Call call = plainCall();
  EXPECT(call.enqueue(nullptr, static_cast<cudaStream_t>(address(99))) == 0);
  FlashAttentionArgs const& args = fake::kernels.args;
  EXPECT(fake::kernels.launches == 1 && fake::kernels.launch_stream == address(99));
  EXPECT(args.dtype == kFlashFloat32 && args.batch == 2 && args.q_num_heads == 6 && args.kv_num_heads == 2);
  EXPECT(args.seqlen_q == 7 && args.seqlen_kv == 9 && args.head_dim == 8 && args.v_head_dim == 5);
  EXPECT(args.scale == 0.25f && args.softcap == 7.0f && args.causal == 1 && args.diagonal == 1);
  EXPECT(args.window_left == 3 && args.window_right == 4 && args.reserved == 0);
  expectTensor(args.query, address(1), 7 * 48, 8, 48);
  expectTensor(args.key, address(2), 9 * 16, 8, 16);
  expectTensor(args.value, address(3), 9 * 10, 5, 10);
  expectTensor(args.output, address(11), 7 * 30, 5, 30);
  EXPECT(args.bias == nullptr && args.kv_lengths == nullptr && args.sinks == nullptr && args.lse == nullptr);
}

TEST(the_kernels_get_heads_first_tensors_and_side_inputs) {
  Call call = exCall();
  EXPECT(call.enqueue() == 0);
  FlashAttentionArgs const& args = fake::kernels.args;
  expectTensor(args.query, address(1), 6 * 7 * 8, 7 * 8, 8);
  expectTensor(args.key, address(2), 2 * 9 * 8, 9 * 8, 8);
  expectTensor(args.value, address(3), 2 * 9 * 5, 9 * 5, 5);
  expectTensor(args.output, address(11), 6 * 7 * 5, 7 * 5, 5);
  EXPECT(args.bias == address(4) && args.bias_dtype == kFlashFloat32);
  EXPECT(args.bias_stride[0] == 0 && args.bias_stride[1] == 9 && args.bias_stride[2] == 0 &&
         args.bias_stride[3] == 1);
  EXPECT(args.kv_lengths == address(5) && args.kv_lengths_stride == 1);
  EXPECT(args.sinks == address(6) && args.sinks_stride == 1);
  EXPECT(args.lse == address(12));
}

TEST(a_length_or_sink_for_all_has_stride_zero) {
  Call call = exCall();
  call.in[4] = desc({1}, DataType::kINT32);
  call.in[5] = desc({1});
  EXPECT(call.enqueue() == 0);
  EXPECT(fake::kernels.args.kv_lengths_stride == 0 && fake::kernels.args.sinks_stride == 0);
}

TEST(the_kernels_get_half_precision_with_an_fp32_bias) {
  Call call = exCall();
  for (PluginTensorDesc* tensor : {&call.in[0], &call.in[1], &call.in[2], &call.out[0]})
    tensor->type = DataType::kBF16;
  EXPECT(call.enqueue() == 0);
  EXPECT(fake::kernels.args.dtype == kFlashBFloat16 && fake::kernels.args.bias_dtype == kFlashFloat32);
  call.in[3].type = DataType::kBF16;
  EXPECT(call.enqueue() == 0);
  EXPECT(fake::kernels.args.bias_dtype == kFlashBFloat16);
}

TEST(the_kernels_get_the_parts_of_a_packed_tensor) {
  Call call = prepare("FlashAttentionPacked", 0, {desc({2, 7, 80}, DataType::kHALF)},
                      {desc({2, 7, 48}, DataType::kHALF)});
  EXPECT(call.enqueue() == 0);
  char* const qkv = static_cast<char*>(address(1));
  FlashAttentionArgs const& args = fake::kernels.args;
  expectTensor(args.query, qkv, 7 * 80, 8, 80);
  expectTensor(args.key, qkv + 2 * 6 * 8, 7 * 80, 8, 80);
  expectTensor(args.value, qkv + 2 * 8 * 8, 7 * 80, 8, 80);
  expectTensor(args.output, address(11), 7 * 48, 8, 48);
}

TEST(strides_are_counted_in_64_bits) {
  int64_t const seqlen = int64_t{1} << 30;
  Call call = prepare("FlashAttention", 0, {desc({2, 7, 48}), desc({2, seqlen, 16}), desc({2, seqlen, 10})},
                      {desc({2, 7, 30})});
  EXPECT(call.enqueue() == 0);
  EXPECT(fake::kernels.args.key.batch_stride == seqlen * 16);
}

TEST(a_failed_launch_is_told_with_its_cuda_error_and_sizes) {
  host::Messages messages;
  Call call = plainCall();
  fake::kernels.status = 719;
  EXPECT(call.enqueue() != 0);
  std::string const text = messages.take();
  for (char const* part :
       {"cannot launch FlashAttention", "attn_3", "batch 2, heads 6/2, sequence 7/9, head dim 8/5",
        "CUDA error 719: unspecified launch failure"}) {
    EXPECT(text.find(part) != std::string::npos, text);
  }
  fake::kernels.status = 0;
  EXPECT(call.enqueue() == 0, messages.take());
}

TEST(a_launch_that_the_kernels_refuse_is_told_with_their_reason) {
  host::Messages messages;
  Call call = plainCall();
  fake::kernels.status = 1;
  fake::kernels.reason = "head_dim is 8; never on Mondays";
  EXPECT(call.enqueue() != 0);
  EXPECT(messages.has("got   head_dim is 8; never on Mondays"), messages.take());
}

TEST(each_of_several_reasons_stands_under_the_first) {
  host::Messages messages;
  Call call = plainCall();
  fake::kernels.status = 1;
  fake::kernels.reason = "head_dim is 320; at most 256.\nv_head_dim is 320; at most 256.";
  EXPECT(call.enqueue() != 0);
  EXPECT(messages.has(
             "\n  got   head_dim is 320; at most 256.\n        v_head_dim is 320; at most 256.\n  need  "),
         messages.take());
}

TEST(an_exception_never_leaves_the_plugin) {
  host::Messages messages;
  Call call = plainCall();
  std::vector<DynamicPluginTensorDesc> const in = host::dynamic(call.in);
  std::vector<DynamicPluginTensorDesc> const out = host::dynamic(call.out);
  fake::kernels.throws = true;
  EXPECT(call.enqueue() != 0);
  EXPECT(messages.has("the kernels' own bug"), messages.take());
  EXPECT(host::runtime(call.plugin).onShapeChange(call.in.data(), 3, call.out.data(), 1) != 0);
  EXPECT(host::build(call.plugin).configurePlugin(in.data(), 3, out.data(), 1) != 0);
  EXPECT(host::build(call.plugin).getWorkspaceSize(in.data(), 3, out.data(), 1) == 0);
  fake::kernels.throws = false;
  EXPECT(call.enqueue() == 0, messages.take());
}

TEST(a_workspace_that_is_wanted_must_be_given) {
  host::Messages messages;
  Call call = plainCall();
  fake::kernels.workspace = 4096;
  EXPECT(call.enqueue() != 0);
  EXPECT(messages.has("4096 bytes of workspace"), messages.take());
  EXPECT(fake::kernels.launches == 0);
  EXPECT(call.enqueue(address(50)) == 0);
  EXPECT(fake::kernels.launch_workspace == address(50));
}

TEST(the_workspace_is_asked_for_the_largest_shapes_that_agree) {
  Call call = exCall();
  std::vector<DynamicPluginTensorDesc> in = host::dynamic(call.in);
  std::vector<DynamicPluginTensorDesc> const out = host::dynamic(call.out);
  in[0].max = host::dims({4, 6, 70, 8});
  in[1].max = host::dims({8, 2, 90, 8});
  in[2].max = host::dims({16, 2, 80, 5});
  in[3].max = host::dims({1, 6, 1, 100});
  in[4].max = host::dims({8});
  fake::kernels.workspace = 12345;
  EXPECT(host::build(call.plugin).getWorkspaceSize(in.data(), 6, out.data(), 2) == 12345);
  FlashAttentionArgs const& args = fake::kernels.args;
  EXPECT(args.batch == 4 && args.seqlen_q == 70 && args.seqlen_kv == 80, args.batch << ' ' << args.seqlen_kv);
  EXPECT(args.bias != nullptr && args.kv_lengths != nullptr && args.sinks != nullptr && args.lse != nullptr);
}

TEST(no_workspace_is_asked_for_or_needed_where_every_length_is_long) {
  Call call = exCall();
  std::vector<DynamicPluginTensorDesc> in = host::dynamic(call.in);
  std::vector<DynamicPluginTensorDesc> const out = host::dynamic(call.out);
  fake::kernels.workspace = 12345;
  for (int64_t shortest : {int64_t{kFlashMaxSplitQueries}, int64_t{kFlashMaxSplitQueries} + 1}) {
    in[0].min = host::dims({1, 6, shortest, 8});
    in[0].max = host::dims({8, 6, 70, 8});
    size_t const asked = host::build(call.plugin).getWorkspaceSize(in.data(), 6, out.data(), 2);
    EXPECT(asked == (shortest > kFlashMaxSplitQueries ? 0 : 12345), shortest << ' ' << asked);
  }
}

TEST(random_descriptions_are_refused_or_launched_but_never_crash) {
  host::Messages messages;
  std::mt19937 random(20261129);
  auto const pick = [&](auto const&... options) {
    int64_t const all[] = {int64_t{options}...};
    return all[random() % sizeof...(options)];
  };
  int launched = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    Call call = trial % 2 == 0 ? exCall() : plainCall();
    for (int change = 0; change < 2; ++change) {
      PluginTensorDesc& tensor =
          random() % 4 == 0 ? call.out[random() % call.out.size()] : call.in[random() % call.in.size()];
      switch (random() % 4) {
        case 0:
          tensor.dims.nbDims = static_cast<int32_t>(pick(-1, 0, 1, 2, 3, 4, 5, 8, 9, 1000));
          break;
        case 1:
          tensor.dims.d[random() % 4] = pick(-1, 0, 1, 2, 6, 7, 9, 16, INT32_MAX, INT64_MAX, INT64_MIN);
          break;
        case 2:
          tensor.type = static_cast<DataType>(pick(0, 1, 2, 3, 5, 7, 8, 77));
          break;
        default:
          call.inputs[random() % call.inputs.size()] = nullptr;
      }
    }
    int32_t const status = call.enqueue();
    EXPECT((status == 0) == messages.take().empty(), "trial " << trial);
    launched += fake::kernels.launches;
  }
  EXPECT(launched > 0 && launched < 10000, launched);
}

TEST(nothing_is_launched_for_an_empty_output) {
  Call call = prepare("FlashAttention", 0, {desc({2, 0, 48}), desc({2, 9, 16}), desc({2, 9, 10})},
                      {desc({2, 0, 30})});
  call.inputs = {nullptr, nullptr, nullptr};
  call.outputs = {nullptr};
  EXPECT(call.enqueue() == 0);
  EXPECT(fake::kernels.launches == 0);
}

}  // namespace
