// SPDX-License-Identifier: Apache-2.0
// plugin/output_shapes.h and plugin/problem.h through the build and runtime capabilities.
#include "host.h"
#include "runner.h"

namespace {

using namespace nvinfer1;
using host::desc;

constexpr DataType kHalf = DataType::kHALF;
constexpr DataType kFloat = DataType::kFLOAT;
constexpr DataType kInt = DataType::kINT32;

host::Fields gqa(int32_t layout) {
  return host::Fields().set("layout", layout).set("q_num_heads", 6).set("kv_num_heads", 2);
}

// The shapes that getOutputShapes gives, as text; "" when it refuses.
std::string outputShapes(char const* op, host::Fields const& fields,
                         std::vector<std::vector<std::string>> const& in) {
  host::PluginPtr const plugin = host::create(op, fields);
  host::Expressions expressions;
  std::vector<DimsExprs> inputs;
  for (auto const& axes : in) inputs.push_back(expressions.shape(axes));
  DimsExprs outputs[2];
  int32_t const count = host::build(plugin).getNbOutputs();
  if (host::build(plugin).getOutputShapes(inputs.data(), static_cast<int32_t>(inputs.size()), nullptr, 0,
                                          outputs, count, expressions) != 0) {
    return "";
  }
  std::string text = host::Expressions::text(outputs[0]);
  return count == 2 ? text + " " + host::Expressions::text(outputs[1]) : text;
}

using Axes = std::vector<std::string>;
Axes const kOne4 = {"1", "1", "1", "1"};

TEST(the_output_has_the_values_head_dim) {
  std::string text =
      outputShapes("FlashAttention", gqa(0), {{"B", "S", "480"}, {"B", "K", "160"}, {"B", "K", "64"}});
  EXPECT(text == "[B, S, 192]", text);
  text = outputShapes("FlashAttention", gqa(0), {{"B", "S", "W"}, {"B", "K", "X"}, {"B", "K", "Y"}});
  EXPECT(text == "[B, S, (Y/2)*6]", text);
  text = outputShapes("FlashAttention", gqa(1),
                      {{"B", "6", "S", "80"}, {"B", "2", "K", "80"}, {"B", "2", "K", "D"}});
  EXPECT(text == "[B, 6, S, D]", text);
}

TEST(an_ex_node_has_an_lse_as_well) {
  Axes const vector = {"1"};
  std::string text =
      outputShapes("FlashAttentionEx", gqa(1),
                   {{"B", "6", "S", "8"}, {"B", "2", "K", "8"}, {"B", "2", "K", "5"}, kOne4, vector, vector});
  EXPECT(text == "[B, 6, S, 5] [B, 6, S]", text);
  text = outputShapes("FlashAttentionEx", gqa(0),
                      {{"B", "S", "48"}, {"B", "K", "16"}, {"B", "K", "10"}, kOne4, vector, vector});
  EXPECT(text == "[B, S, 30] [B, 6, S]", text);
}

TEST(a_packed_node_keeps_the_query_heads) {
  std::string text = outputShapes("FlashAttentionPacked", gqa(0), {{"B", "S", "640"}});
  EXPECT(text == "[B, S, 384]", text);
  text = outputShapes("FlashAttentionPacked", gqa(0), {{"3", "S", "W"}});
  EXPECT(text == "[3, S, (W/10)*6]", text);
}

TEST(a_rank_or_head_count_that_does_not_fit_is_refused_while_parsing) {
  host::Messages messages;
  auto const refused = [&](char const* op, int32_t layout, std::vector<Axes> const& in,
                           std::string const& part) {
    EXPECT(outputShapes(op, gqa(layout), in).empty(), part);
    std::string const text = messages.take();
    EXPECT(text.find(part) != std::string::npos, text);
  };
  refused("FlashAttention", 0, {{"B", "6", "S", "8"}, {"B", "K", "16"}, {"B", "K", "16"}},
          "query\n  got   shape [?, 6, ?, 8]");
  refused("FlashAttention", 0, {{"B", "S", "50"}, {"B", "K", "16"}, {"B", "K", "16"}},
          "[B, S, 6*D] (layout 0)");
  refused("FlashAttention", 1, {{"B", "6", "S", "8"}, {"B", "3", "K", "8"}, {"B", "2", "K", "8"}},
          "[B, 2, S, D] (layout 1)");
  refused("FlashAttention", 1, {{"B", "6", "S", "8"}, {"B", "2", "K", "8"}, {"B", "2", "8"}}, "tensor value");
  refused("FlashAttentionPacked", 0, {{"B", "S", "64"}}, "tensor qkv");
  refused("FlashAttention", 0, {{"B", "S", "48"}, {"B", "K", "16"}}, "2 inputs, 1 outputs");
}

// --- dtypes ---

std::vector<DynamicPluginTensorDesc> exTensors(std::vector<DataType> const& dtypes) {
  std::vector<PluginTensorDesc> all;
  for (DataType dtype : dtypes) all.push_back(desc({1}, dtype));
  return host::dynamic(all);
}

TEST(dtypes_follow_the_query) {
  host::PluginPtr const plugin = host::create("FlashAttentionEx", host::Fields());
  auto const supported = [&](int32_t position, std::vector<DataType> const& dtypes) {
    return host::build(plugin).supportsFormatCombination(position, exTensors(dtypes).data(), 6, 2);
  };
  for (DataType dtype : {kFloat, kHalf, DataType::kBF16}) {
    std::vector<DataType> const good = {dtype, dtype, dtype, dtype, kInt, kFloat, dtype, kFloat};
    for (int32_t i = 0; i < 8; ++i) {
      EXPECT(supported(i, good), "position " << i);
      for (DataType wrong : {DataType::kINT8, DataType::kBOOL, DataType::kINT64, DataType::kUINT8}) {
        std::vector<DataType> bad = good;
        bad[i] = wrong;
        EXPECT(!supported(i, bad), "position " << i << " dtype " << static_cast<int32_t>(wrong));
      }
    }
  }
  EXPECT(supported(3, {kHalf, kHalf, kHalf, kFloat, kInt, kFloat, kHalf, kFloat}));
  EXPECT(!supported(3, {kHalf, kHalf, kHalf, DataType::kBF16, kInt, kFloat, kHalf, kFloat}));
  EXPECT(!supported(1, {kHalf, kFloat, kHalf, kHalf, kInt, kFloat, kHalf, kFloat}));
  EXPECT(!supported(6, {kHalf, kHalf, kHalf, kHalf, kInt, kFloat, kFloat, kFloat}));
  EXPECT(!supported(7, {kHalf, kHalf, kHalf, kHalf, kInt, kFloat, kHalf, kHalf}));

  std::vector<DynamicPluginTensorDesc> tensors = exTensors({kHalf});
  tensors[0].desc.format = TensorFormat::kCHW32;
  EXPECT(!host::build(plugin).supportsFormatCombination(0, tensors.data(), 6, 2));
}

TEST(output_dtypes_are_the_querys_and_fp32) {
  host::PluginPtr const plugin = host::create("FlashAttentionEx", host::Fields());
  DataType out[2];
  DataType const in[] = {kHalf, kHalf, kHalf, kFloat, kInt, kFloat};
  EXPECT(host::build(plugin).getOutputDataTypes(out, 2, in, 6) == 0);
  EXPECT(out[0] == kHalf && out[1] == kFloat);
}

TEST(a_wrong_input_dtype_is_refused_while_parsing) {
  host::Messages messages;
  host::PluginPtr const plugin = host::create("FlashAttentionEx", host::Fields());
  DataType const good[] = {kHalf, kHalf, kHalf, kHalf, kInt, kFloat};
  char const* const names[] = {"query", "key", "value", "bias", "kv_lengths", "sinks"};
  for (int32_t i = 0; i < 6; ++i) {
    std::vector<DataType> bad(good, good + 6);
    bad[i] = DataType::kBOOL;
    DataType out[2];
    EXPECT(host::build(plugin).getOutputDataTypes(out, 2, bad.data(), 6) != 0, names[i]);
    std::string const text = messages.take();
    EXPECT(text.find(std::string{"tensor "} + names[i] + "\n  got   bool") != std::string::npos, text);
  }
}

// --- shapes at build and run time ---

struct Tensors {
  std::vector<PluginTensorDesc> in;
  std::vector<PluginTensorDesc> out;
};

Tensors exProblem() {
  return {
      {desc({2, 7, 48}), desc({2, 9, 16}), desc({2, 9, 10}), desc({2, 1, 7, 9}), desc({2}, kInt), desc({6})},
      {desc({2, 7, 30}), desc({2, 6, 7})}};
}

host::PluginPtr exPlugin() {
  return host::create("FlashAttentionEx",
                      gqa(0).set("has_bias", 1).set("has_kv_lengths", 1).set("has_sinks", 1));
}

int32_t shapeChange(host::PluginPtr const& plugin, Tensors const& t) {
  return host::runtime(plugin).onShapeChange(t.in.data(), static_cast<int32_t>(t.in.size()), t.out.data(),
                                             static_cast<int32_t>(t.out.size()));
}

int32_t configure(host::PluginPtr const& plugin, Tensors const& t) {
  std::vector<DynamicPluginTensorDesc> const in = host::dynamic(t.in);
  std::vector<DynamicPluginTensorDesc> const out = host::dynamic(t.out);
  return host::build(plugin).configurePlugin(in.data(), static_cast<int32_t>(in.size()), out.data(),
                                             static_cast<int32_t>(out.size()));
}

TEST(a_shape_that_does_not_fit_is_refused_by_name) {
  struct Wrong {
    size_t tensor;
    PluginTensorDesc desc;
    char const* text;
  };
  Wrong const wrongs[] = {
      {0, desc({2, 7, 6, 8}), "tensor query\n  got   shape [2, 7, 6, 8]"},
      {0, desc({2, 7, 50}), "tensor query\n  got   shape [2, 7, 50]"},
      {0, desc({3, 7, 48}), "tensor key\n  got   batch 2"},
      {0, desc({2, -1, 48}), "tensor query\n  got   shape [2, ?, 48]"},
      {0, desc({0, int64_t{1} << 40, 6 * (int64_t{1} << 30)}), "63 bits"},
      {0, desc({2, int64_t{1} << 40, 6 * (int64_t{1} << 30)}), "63 bits"},
      {0, desc({}), "tensor query\n  got   shape []"},
      {1, desc({2, 9, 18}), "tensor key\n  got   batch 2, head dim 9"},
      {1, desc({2, 8, 16}), "tensor value\n  got   batch 2, sequence 9"},
      {2, desc({1, 9, 10}), "tensor value\n  got   batch 1"},
      {2, desc({2, 9, 10}, kHalf), "tensor value\n  got   fp16"},
      {3, desc({2, 1, 7, 8}), "tensor bias\n  got   shape [2, 1, 7, 8]"},
      {3, desc({1, 7, 9}), "tensor bias\n  got   shape [1, 7, 9]"},
      {3, desc({2, 1, 7, 9}, DataType::kBOOL), "tensor bias\n  got   bool"},
      {4, desc({3}, kInt), "tensor kv_lengths\n  got   shape [3]"},
      {4, desc({2}, DataType::kINT64), "tensor kv_lengths\n  got   int64"},
      {5, desc({2}), "tensor sinks\n  got   shape [2]"},
      {5, desc({6}, kHalf), "tensor sinks\n  got   fp16"},
  };
  host::Messages messages;
  host::PluginPtr const plugin = exPlugin();
  for (Wrong const& wrong : wrongs) {
    Tensors tensors = exProblem();
    tensors.in[wrong.tensor] = wrong.desc;
    for (auto* const call : {shapeChange, configure}) {
      EXPECT(call(plugin, tensors) != 0, wrong.text);
      std::string const text = messages.take();
      EXPECT(text.find(wrong.text) != std::string::npos, "no \"" << wrong.text << "\" in: " << text);
      EXPECT(call(plugin, exProblem()) == 0, messages.take());
    }
  }
}

TEST(an_output_that_does_not_fit_is_refused) {
  host::Messages messages;
  host::PluginPtr const plugin = exPlugin();
  auto const refused = [&](size_t output, PluginTensorDesc const& wrong, char const* part) {
    Tensors tensors = exProblem();
    tensors.out[output] = wrong;
    EXPECT(shapeChange(plugin, tensors) != 0, part);
    std::string const text = messages.take();
    EXPECT(text.find(part) != std::string::npos, text);
  };
  refused(0, desc({2, 7, 48}), "tensor output\n  got   shape [2, 7, 48]\n  need  shape [2, 7, 30]");
  refused(0, desc({2, 7, 30}, kHalf), "tensor output\n  got   fp16");
  refused(1, desc({2, 7, 6}), "tensor lse\n  got   shape [2, 7, 6]");
  refused(1, desc({2, 6, 7}, kHalf), "tensor lse\n  got   fp16");
}

TEST(a_format_other_than_linear_is_refused) {
  host::Messages messages;
  Tensors tensors = exProblem();
  tensors.in[1].format = TensorFormat::kCHW4;
  EXPECT(shapeChange(exPlugin(), tensors) != 0);
  EXPECT(messages.has("tensor key\n  got   tensor format 3"), messages.take());
}

TEST(a_wrong_number_of_tensors_is_refused) {
  host::Messages messages;
  Tensors tensors = exProblem();
  tensors.in.pop_back();
  EXPECT(shapeChange(exPlugin(), tensors) != 0);
  EXPECT(messages.has("got   5 inputs, 2 outputs"), messages.take());
}

TEST(what_the_kernels_do_not_run_is_refused_with_their_reason) {
  host::Messages messages;
  host::PluginPtr const plugin = host::create("FlashAttention", host::Fields());
  // 2 query heads and 1 key and value head of 100,000 elements each.
  Tensors const tensors{{desc({1, 3, 200000}), desc({1, 3, 100000}), desc({1, 3, 100000})},
                        {desc({1, 3, 200000})}};
  EXPECT(configure(plugin, tensors) != 0);
  EXPECT(messages.has("100000"), messages.take());
  EXPECT(shapeChange(plugin, tensors) != 0);
}

TEST(bounds_that_do_not_agree_are_no_reason_to_refuse) {
  host::Messages messages;
  host::PluginPtr const plugin = exPlugin();
  std::vector<DynamicPluginTensorDesc> in = host::dynamic(exProblem().in);
  std::vector<DynamicPluginTensorDesc> const out = host::dynamic(exProblem().out);
  for (auto& tensor : in) tensor.desc.dims = host::dims({-1, -1, -1});
  in[0].max = host::dims({4, 70, 48});
  in[1].max = host::dims({8, 90, 16});
  in[2].max = host::dims({16, 80, 10});
  in[3].max = host::dims({100, 1, 100, 100});
  in[4].max = host::dims({8});
  EXPECT(host::build(plugin).configurePlugin(in.data(), 6, out.data(), 2) == 0, messages.take());
  host::build(plugin).getWorkspaceSize(in.data(), 6, out.data(), 2);
  EXPECT(messages.take().empty());
}

TEST(shapes_of_side_inputs_that_are_off_do_not_matter) {
  host::Messages messages;
  host::PluginPtr const plugin = host::create("FlashAttentionEx", gqa(0));
  Tensors tensors = exProblem();
  tensors.in[3] = desc({1, 1, 1, 1});
  tensors.in[4] = desc({1}, kInt);
  tensors.in[5] = desc({1});
  EXPECT(shapeChange(plugin, tensors) == 0, messages.take());
}

}  // namespace
