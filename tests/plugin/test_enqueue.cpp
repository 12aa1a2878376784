// SPDX-License-Identifier: Apache-2.0
// enqueue() on host memory: the plugin around the emulated kernels, fp32, against the float64 reference. The
// dtypes and the full table of cases run through the same interface in test_contract.py.
#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "host.h"
#include "reference.h"
#include "runner.h"

namespace {

using namespace nvinfer1;
using reference::Problem;
using Floats = std::vector<float>;

Floats random(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

Problem filled(Problem p) {
  p.query = random(p.batch * p.heads_q * p.seqlen_q * p.head_dim, 1);
  p.key = random(p.batch * p.heads_kv * p.seqlen_kv * p.head_dim, 2);
  p.value = random(p.batch * p.heads_kv * p.seqlen_kv * p.v_head_dim, 3);
  return p;
}

// [B, H, S, D] to [B, S, H*D].
Floats headsLast(Floats const& from, int64_t batch, int64_t heads, int64_t seqlen, int64_t dim) {
  Floats to(from.size());
  for (int64_t i = 0; i < batch * heads * seqlen; ++i) {
    int64_t const b = i / (heads * seqlen), h = i / seqlen % heads, s = i % seqlen;
    std::copy_n(&from[i * dim], dim, &to[((b * seqlen + s) * heads + h) * dim]);
  }
  return to;
}

Floats headsFirst(Floats const& from, int64_t batch, int64_t heads, int64_t seqlen, int64_t dim) {
  return headsLast(from, batch, seqlen, heads, dim);
}

// One node with its tensors in host memory.
struct Call {
  host::PluginPtr plugin;
  std::vector<PluginTensorDesc> in, out;
  std::vector<Floats> buffers;
  std::vector<void const*> inputs;
  Floats output, lse;
  std::vector<void*> outputs;

  void add(std::vector<int64_t> const& shape, Floats data) {
    in.push_back(host::desc(shape));
    buffers.push_back(std::move(data));
  }

  int32_t run() {
    auto const inputs_dynamic = host::dynamic(in);
    auto const outputs_dynamic = host::dynamic(out);
    auto const nbIn = static_cast<int32_t>(in.size());
    auto const nbOut = static_cast<int32_t>(out.size());
    if (host::runtime(plugin).onShapeChange(in.data(), nbIn, out.data(), nbOut) != 0) return 100;
    std::vector<char> workspace(
        host::build(plugin).getWorkspaceSize(inputs_dynamic.data(), nbIn, outputs_dynamic.data(), nbOut));
    return host::runtime(plugin).enqueue(in.data(), out.data(), inputs.data(), outputs.data(),
                                         workspace.empty() ? nullptr : workspace.data(), nullptr);
  }
};

host::Fields fieldsOf(Problem const& p, int32_t layout) {
  host::Fields fields;
  fields.set("q_num_heads", p.heads_q).set("kv_num_heads", p.heads_kv).set("layout", layout);
  fields.set("scale", p.scale)
      .set("softcap", p.softcap)
      .set("causal", p.causal)
      .set("diagonal", p.bottom_right);
  fields.set("window_left", p.window_left).set("window_right", p.window_right);
  fields.set("has_bias", !p.bias.empty()).set("has_kv_lengths", !p.kv_lengths.empty());
  return fields.set("has_sinks", !p.sinks.empty());
}

void addOutputs(Call& call, Problem const& p, char const* op, int32_t layout) {
  call.output.assign(p.batch * p.heads_q * p.seqlen_q * p.v_head_dim, NAN);  // what is not written shows
  if (layout == 1) {
    call.out.push_back(host::desc({p.batch, p.heads_q, p.seqlen_q, p.v_head_dim}));
  } else {
    call.out.push_back(host::desc({p.batch, p.seqlen_q, p.heads_q * p.v_head_dim}));
  }
  call.outputs = {call.output.data()};
  if (std::string{op} != "FlashAttentionEx") return;
  call.lse.assign(p.batch * p.heads_q * p.seqlen_q, NAN);
  call.out.push_back(host::desc({p.batch, p.heads_q, p.seqlen_q}));
  call.outputs.push_back(call.lse.data());
}

void addSideInputs(Call& call, Problem const& p) {
  bool const hasBias = !p.bias.empty();
  // The neutral constants hold what would show if anybody read them.
  call.add(hasBias ? std::vector<int64_t>{p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv}
                   : std::vector<int64_t>{1, 1, 1, 1},
           hasBias ? p.bias : Floats{NAN});
  Floats lengths(p.kv_lengths.empty() ? 1 : p.batch, NAN);
  if (!p.kv_lengths.empty())
    std::copy_n(reinterpret_cast<float const*>(p.kv_lengths.data()), p.batch, lengths.data());
  call.add({static_cast<int64_t>(lengths.size())}, lengths);
  call.in.back().type = DataType::kINT32;
  call.add({p.sinks.empty() ? 1 : p.heads_q}, p.sinks.empty() ? Floats{NAN} : p.sinks);
}

Call prepare(char const* op, Problem const& p, int32_t layout) {
  Call call;
  call.plugin = host::create(op, fieldsOf(p, layout));
  EXPECT(call.plugin != nullptr);
  if (layout == 1) {
    call.add({p.batch, p.heads_q, p.seqlen_q, p.head_dim}, p.query);
    call.add({p.batch, p.heads_kv, p.seqlen_kv, p.head_dim}, p.key);
    call.add({p.batch, p.heads_kv, p.seqlen_kv, p.v_head_dim}, p.value);
  } else {
    call.add({p.batch, p.seqlen_q, p.heads_q * p.head_dim},
             headsLast(p.query, p.batch, p.heads_q, p.seqlen_q, p.head_dim));
    call.add({p.batch, p.seqlen_kv, p.heads_kv * p.head_dim},
             headsLast(p.key, p.batch, p.heads_kv, p.seqlen_kv, p.head_dim));
    call.add({p.batch, p.seqlen_kv, p.heads_kv * p.v_head_dim},
             headsLast(p.value, p.batch, p.heads_kv, p.seqlen_kv, p.v_head_dim));
  }
  if (std::string{op} == "FlashAttentionEx") addSideInputs(call, p);
  for (Floats const& buffer : call.buffers) call.inputs.push_back(buffer.empty() ? nullptr : buffer.data());
  addOutputs(call, p, op, layout);
  return call;
}

void expectRight(Call& call, Problem const& p, int32_t layout) {
  host::Messages messages;
  int32_t const status = call.run();
  EXPECT(status == 0, "status " << status << ": " << messages.take());
  reference::Result const truth = reference::attention<double>(p);
  reference::Result const base = reference::attention<float>(p);
  Floats const output =
      layout == 1 ? call.output : headsFirst(call.output, p.batch, p.heads_q, p.seqlen_q, p.v_head_dim);
  std::string wrong = reference::judge(output, truth.output, base.output);
  EXPECT(wrong.empty(), "output: " << wrong);
  if (call.lse.empty()) return;
  wrong = reference::judgeLse(call.lse, truth.lse);
  EXPECT(wrong.empty(), "lse: " << wrong);
}

void expectRight(char const* op, Problem const& p) {
  for (int32_t layout : {0, 1}) {
    Call call = prepare(op, p, layout);
    expectRight(call, p, layout);
  }
}

Problem oddProblem() {
  Problem p;
  p.batch = 2;
  p.heads_q = 6;
  p.heads_kv = 2;
  p.seqlen_q = 13;
  p.seqlen_kv = 37;
  p.head_dim = 24;
  p.v_head_dim = 40;
  p.scale = 0.3;
  return filled(p);
}

TEST(plain_attention_is_right_in_both_layouts) { expectRight("FlashAttention", oddProblem()); }

TEST(causal_attention_is_right_with_both_diagonals) {
  Problem p = oddProblem();
  p.causal = true;
  expectRight("FlashAttention", p);
  p.bottom_right = true;
  expectRight("FlashAttention", p);
}

TEST(a_full_bias_and_lengths_are_right) {
  Problem p = oddProblem();
  p.bias = random(p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv, 4);
  for (size_t i = 0; i < p.bias.size(); i += 5) p.bias[i] = -INFINITY;
  expectRight("FlashAttentionEx", p);
  p.kv_lengths = {36, 5};
  expectRight("FlashAttentionEx", p);
}

TEST(bottom_right_counts_from_the_lengths) {
  Problem p = oddProblem();
  p.causal = p.bottom_right = true;
  p.kv_lengths = {29, 3};  // The second leaves rows without any key.
  expectRight("FlashAttentionEx", p);
}

TEST(a_bias_with_dimensions_of_one_is_broadcast) {
  Problem p = oddProblem();
  Floats const keys = random(p.batch * p.seqlen_kv, 5);
  for (int64_t i = 0; i < p.batch * p.heads_q * p.seqlen_q; ++i) {
    int64_t const b = i / (p.heads_q * p.seqlen_q);
    p.bias.insert(p.bias.end(), &keys[b * p.seqlen_kv], &keys[b * p.seqlen_kv] + p.seqlen_kv);
  }
  Call call = prepare("FlashAttentionEx", p, 1);
  call.in[3] = host::desc({p.batch, 1, 1, p.seqlen_kv});
  call.inputs[3] = keys.data();
  expectRight(call, p, 1);
}

TEST(neutral_constants_are_never_read) { expectRight("FlashAttentionEx", oddProblem()); }

TEST(side_inputs_that_are_off_may_be_null) {
  Problem const p = oddProblem();
  Call call = prepare("FlashAttentionEx", p, 0);
  call.inputs[3] = call.inputs[4] = call.inputs[5] = nullptr;
  expectRight(call, p, 0);
}

TEST(packed_attention_is_right) {
  Problem p = oddProblem();
  p.seqlen_q = p.seqlen_kv = 21;
  p.v_head_dim = p.head_dim;
  p = filled(p);
  Call call;
  call.plugin = host::create("FlashAttentionPacked", fieldsOf(p, 0));
  int64_t const width = (p.heads_q + 2 * p.heads_kv) * p.head_dim;
  Floats const query = headsLast(p.query, p.batch, p.heads_q, p.seqlen_q, p.head_dim);
  Floats const key = headsLast(p.key, p.batch, p.heads_kv, p.seqlen_kv, p.head_dim);
  Floats const value = headsLast(p.value, p.batch, p.heads_kv, p.seqlen_kv, p.head_dim);
  Floats packed;
  for (int64_t row = 0; row < p.batch * p.seqlen_q; ++row) {
    for (Floats const* part : {&query, &key, &value}) {
      int64_t const columns = static_cast<int64_t>(part->size()) / (p.batch * p.seqlen_q);
      packed.insert(packed.end(), part->begin() + row * columns, part->begin() + (row + 1) * columns);
    }
  }
  call.add({p.batch, p.seqlen_q, width}, packed);
  call.inputs = {call.buffers[0].data()};
  addOutputs(call, p, "FlashAttentionPacked", 0);
  expectRight(call, p, 0);
}

TEST(clones_and_attached_plugins_compute_the_same) {
  Problem p = oddProblem();
  p.causal = true;
  Call call = prepare("FlashAttention", p, 0);
  host::PluginPtr const original = std::move(call.plugin);
  call.plugin.reset(original->clone());
  expectRight(call, p, 0);
  call.plugin.reset(host::runtime(original).attachToContext(nullptr));
  expectRight(call, p, 0);
}

TEST(empty_problems_need_no_addresses) {
  for (int axis = 0; axis < 2; ++axis) {
    Problem p = oddProblem();
    (axis == 0 ? p.batch : p.seqlen_q) = 0;
    p = filled(p);
    for (char const* op : {"FlashAttention", "FlashAttentionEx"}) {
      Call call = prepare(op, p, 1);
      std::fill(call.inputs.begin(), call.inputs.end(), nullptr);
      std::fill(call.outputs.begin(), call.outputs.end(), nullptr);
      host::Messages messages;
      EXPECT(call.run() == 0, op << ": " << messages.take());
    }
  }
}

TEST(no_keys_give_zeros_and_an_lse_of_minus_infinity) {
  Problem p = oddProblem();
  p.seqlen_kv = 0;
  expectRight("FlashAttentionEx", filled(p));  // key and value are null
}

TEST(a_null_address_is_refused_by_name_and_the_next_call_works) {
  Problem p = oddProblem();
  p.bias = random(p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv, 4);
  p.kv_lengths = {30, 37};
  Call call = prepare("FlashAttentionEx", p, 0);
  // Takes one address away, expects a refusal that names the tensor, gives it back.
  auto const refused = [&](auto& address, char const* name) {
    host::Messages messages;
    auto const kept = std::exchange(address, nullptr);
    EXPECT(call.run() != 0, name);
    EXPECT(messages.has(std::string{"tensor "} + name + "\n  got   a null address"), messages.take());
    address = kept;
  };
  char const* const names[] = {"query", "key", "value", "bias", "kv_lengths"};
  for (int i = 0; i < 5; ++i) refused(call.inputs[i], names[i]);
  refused(call.outputs[0], "output");
  refused(call.outputs[1], "lse");
  expectRight(call, p, 0);
}

TEST(messages_without_a_logger_do_not_crash) {
  setLoggerFinder(nullptr);
  EXPECT(host::create("FlashAttention", std::vector<PluginField>{}) == nullptr);
}

TEST(a_logger_finder_that_throws_or_finds_nothing_does_not_crash) {
  struct Broken final : ILoggerFinder {
    bool throws = true;
    ILogger* findLogger() override { return throws ? throw std::runtime_error("no logger") : nullptr; }
  } broken;
  setLoggerFinder(&broken);
  EXPECT(host::create("FlashAttention", std::vector<PluginField>{}) == nullptr);
  broken.throws = false;
  EXPECT(host::create("FlashAttention", std::vector<PluginField>{}) == nullptr);
  setLoggerFinder(nullptr);
}

}  // namespace
