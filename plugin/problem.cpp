// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "describe.h"
#include "head_tensors.h"
#include "log.h"

namespace flash_export {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

// Stands for the address of a side input while only shapes are known. Never read.
float const kPlaceholder = 0.0f;

std::optional<FlashDtype> flashDtype(DataType dtype) {
  switch (dtype) {
    case DataType::kFLOAT:
      return kFlashFloat32;
    case DataType::kHALF:
      return kFlashFloat16;
    case DataType::kBF16:
      return kFlashBFloat16;
    default:
      return std::nullopt;
  }
}

char const* neededDtype(int32_t input) {
  switch (input) {
    case kQuery:
      return "fp32, fp16 or bf16";
    case kBias:
      return "the query's dtype or fp32";
    case kKvLengths:
    case kPageTable:
      return "int32";
    case kSinks:
      return "fp32";
    default:
      return "the query's dtype";
  }
}

// W entries a batch of pages that hold T keys each: a cache of W*T keys.
void readPages(Node const& node, PluginTensorDesc const* inputs, HeadTensor const& pages,
               FlashAttentionArgs& args) {
  Dims const& table = inputs[kPageTable].dims;
  if (table.nbDims != 2 || table.d[0] != args.batch) {
    refuse(node, "page_table", "shape " + textOf(table), "[" + std::to_string(args.batch) + ", W]");
  }
  args.page_count = narrow(node, "key_cache", "pages", pages.batch);
  args.page_size = narrow(node, "key_cache", "keys a page", pages.seqlen);
  args.page_table_stride = narrow(node, "page_table", "entries a batch", table.d[1]);
  args.seqlen_kv = args.page_table_stride * args.page_size;
  args.page_table = reinterpret_cast<int32_t const*>(&kPlaceholder);
}

void readSeparate(Node const& node, PluginTensorDesc const* inputs, FlashAttentionArgs& args) {
  Params const& params = node.params;
  int32_t const keys = keysOf(node.op), values = valuesOf(node.op);
  HeadTensor const query = readHeadTensor(node, kQuery, inputs[kQuery].dims, params.q_num_heads);
  HeadTensor const key = readHeadTensor(node, keys, inputs[keys].dims, params.kv_num_heads);
  HeadTensor const value = readHeadTensor(node, values, inputs[values].dims, params.kv_num_heads);
  bool const sameBatch = isPaged(node.op) || key.batch == query.batch;
  if (!sameBatch || key.head_dim != query.head_dim) {
    refuse(
        node, inputName(node.op, keys),
        "batch " + std::to_string(key.batch) + ", head dim " + std::to_string(key.head_dim),
        "the query's: batch " + std::to_string(query.batch) + ", head dim " + std::to_string(query.head_dim));
  }
  if (value.batch != key.batch || value.seqlen != key.seqlen) {
    refuse(node, inputName(node.op, values),
           "batch " + std::to_string(value.batch) + ", sequence " + std::to_string(value.seqlen),
           std::string{"those of "} + inputName(node.op, keys) + ": batch " + std::to_string(key.batch) +
               ", sequence " + std::to_string(key.seqlen));
  }
  args.batch = narrow(node, "query", "batch", query.batch);
  args.head_dim = narrow(node, "query", "head dim", query.head_dim);
  args.v_head_dim = narrow(node, inputName(node.op, values), "head dim", value.head_dim);
  args.seqlen_q = query.seqlen;
  args.seqlen_kv = key.seqlen;
  args.query = stridesOf(params.layout, params.q_num_heads, query.seqlen, query.head_dim);
  args.key = stridesOf(params.layout, params.kv_num_heads, key.seqlen, key.head_dim);
  args.value = stridesOf(params.layout, params.kv_num_heads, value.seqlen, value.head_dim);
  if (isPaged(node.op)) readPages(node, inputs, key, args);
}

void readPacked(Node const& node, PluginTensorDesc const* inputs, FlashAttentionArgs& args) {
  Params const& params = node.params;
  int32_t const heads = params.q_num_heads + 2 * params.kv_num_heads;
  HeadTensor const qkv = readHeadTensor(node, kQuery, inputs[kQuery].dims, heads);
  args.batch = narrow(node, "qkv", "batch", qkv.batch);
  args.head_dim = narrow(node, "qkv", "head dim", qkv.head_dim);
  args.v_head_dim = args.head_dim;
  args.seqlen_q = args.seqlen_kv = qkv.seqlen;
  args.query = args.key = args.value = stridesOf(0, heads, qkv.seqlen, qkv.head_dim);
}

void readBias(Node const& node, PluginTensorDesc const& desc, FlashAttentionArgs& args) {
  int64_t const full[4] = {args.batch, args.q_num_heads, args.seqlen_q, args.seqlen_kv};
  Dims const& dims = desc.dims;
  int64_t stride = 1;
  for (int32_t i = 3; i >= 0; --i) {
    if (dims.nbDims != 4 || (dims.d[i] != 1 && dims.d[i] != full[i])) {
      refuse(node, "bias", "shape " + textOf(dims),
             "rank 4, each dimension 1 or that of " + textOf(Dims{4, {full[0], full[1], full[2], full[3]}}));
    }
    args.bias_stride[i] = dims.d[i] == 1 ? 0 : stride;
    stride *= dims.d[i];
  }
  args.bias = &kPlaceholder;
  args.bias_dtype = *flashDtype(desc.type);
}

// The stride of a side input of shape [full] or [1].
int64_t readVector(Node const& node, int32_t input, Dims const& dims, int64_t full) {
  if (dims.nbDims != 1 || (dims.d[0] != 1 && dims.d[0] != full)) {
    refuse(node, inputName(node.op, input), "shape " + textOf(dims), "[" + std::to_string(full) + "] or [1]");
  }
  return dims.d[0] == 1 ? 0 : 1;
}

void readSideInputs(Node const& node, PluginTensorDesc const* inputs, FlashAttentionArgs& args) {
  if (node.params.has_bias != 0) readBias(node, inputs[kBias], args);
  if (node.params.has_kv_lengths != 0) {
    args.kv_lengths_stride = readVector(node, kKvLengths, inputs[kKvLengths].dims, args.batch);
    args.kv_lengths = reinterpret_cast<int32_t const*>(&kPlaceholder);
  }
  if (node.params.has_sinks != 0) {
    args.sinks_stride = readVector(node, kSinks, inputs[kSinks].dims, args.q_num_heads);
    args.sinks = &kPlaceholder;
  }
  args.lse = const_cast<float*>(&kPlaceholder);
}

size_t elementSize(int32_t dtype) { return dtype == kFlashFloat32 ? 4 : 2; }

}  // namespace

bool isDtypeSupported(Operator op, int32_t position, DataType dtype, DataType query) {
  int32_t const inputs = infoOf(op).inputs;
  if (position == kQuery) return flashDtype(dtype).has_value();
  if (position == inputs + kLse || (position < inputs && position == kSinks))
    return dtype == DataType::kFLOAT;
  bool const isInt = position == kKvLengths || position == kPageTable;
  if (position == inputs + kKvLengthsOut || (position < inputs && isInt)) return dtype == DataType::kINT32;
  if (position < inputs && position == kBias) return dtype == query || dtype == DataType::kFLOAT;
  return dtype == query;
}

void checkInputDtypes(Node const& node, DataType const* dtypes, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    if (!isDtypeSupported(node.op, i, dtypes[i], dtypes[kQuery])) {
      refuse(node, inputName(node.op, i), textOf(dtypes[i]), neededDtype(i));
    }
  }
}

Dims outputDims(Node const& node, FlashAttentionArgs const& args) {
  if (node.params.layout == 1) return {4, {args.batch, args.q_num_heads, args.seqlen_q, args.v_head_dim}};
  return {3, {args.batch, args.seqlen_q, int64_t{args.q_num_heads} * args.v_head_dim}};
}

FlashAttentionArgs readProblem(Node const& node, PluginTensorDesc const* inputs) {
  Params const& params = node.params;
  DataType dtypes[kPageTable + 1];
  for (int32_t i = 0; i < infoOf(node.op).inputs; ++i) {
    dtypes[i] = inputs[i].type;
    requireLinear(node, inputName(node.op, i), inputs[i]);
    requireCountable(node, inputName(node.op, i), inputs[i].dims);
  }
  checkInputDtypes(node, dtypes, infoOf(node.op).inputs);

  FlashAttentionArgs args{};
  args.dtype = *flashDtype(inputs[kQuery].type);
  args.q_num_heads = params.q_num_heads;
  args.kv_num_heads = params.kv_num_heads;
  args.scale = params.scale;
  args.softcap = params.softcap;
  args.causal = params.causal;
  args.diagonal = params.diagonal;
  args.window_left = params.window_left;
  args.window_right = params.window_right;
  if (node.op == Operator::kFlashAttentionPacked) {
    readPacked(node, inputs, args);
  } else {
    readSeparate(node, inputs, args);
  }
  requireCountable(node, "output", outputDims(node, args));
  args.output = stridesOf(params.layout, params.q_num_heads, args.seqlen_q, args.v_head_dim);
  if (hasSideInputs(node.op)) readSideInputs(node, inputs, args);
  return args;
}

void checkSupported(Node const& node, FlashAttentionArgs const& args) {
  char reasons[1024];
  if (flashAttentionWhyUnsupported(&args, reasons, sizeof reasons) == 0) return;
  throw PluginError(std::string{"cannot run "} + infoOf(node.op).name, "node \"" + node.layer + "\"", reasons,
                    "a problem that the kernels run",
                    "export with --skip for this node, or change what the reason names");
}

void agreeOnBounds(Node const& node, PluginTensorDesc* inputs) {
  if (node.op == Operator::kFlashAttentionPacked) return;
  int32_t const sequence = node.params.layout == 1 ? 2 : 1;
  // Gives one axis of some inputs the smallest of its bounds.
  auto const agree = [&](std::vector<int32_t> const& those, int32_t axis) {
    int64_t least = inputs[those.front()].dims.d[axis];
    for (int32_t i : those) least = std::min(least, inputs[i].dims.d[axis]);
    for (int32_t i : those) inputs[i].dims.d[axis] = least;
    return least;
  };
  std::vector<int32_t> batched{kQuery, kKey, kValue};
  if (isCache(node.op)) {
    agree({kKeyCache, kValueCache}, 0);
    for (int32_t i : {kKeyCache, kValueCache}) {
      if (!isPaged(node.op)) batched.push_back(i);
    }
    if (isPaged(node.op)) batched.push_back(kPageTable);
  }
  int64_t const batch = agree(batched, 0);
  agree({kKey, kValue}, sequence);
  int64_t seqlen_kv = agree({keysOf(node.op), valuesOf(node.op)}, sequence);
  if (!hasSideInputs(node.op)) return;

  if (isPaged(node.op)) seqlen_kv *= inputs[kPageTable].dims.d[1];
  auto const broadcastable = [](int64_t& bound, int64_t full) { bound = bound == 1 ? 1 : full; };
  int64_t const full[4] = {batch, node.params.q_num_heads, inputs[kQuery].dims.d[sequence], seqlen_kv};
  for (int32_t i = 0; i < 4; ++i) broadcastable(inputs[kBias].dims.d[i], full[i]);
  broadcastable(inputs[kKvLengths].dims.d[0], batch);
}

void checkOutputs(Node const& node, FlashAttentionArgs const& args, PluginTensorDesc const* outputs) {
  requireLinear(node, "output", outputs[kOutput]);
  requireShape(node, "output", outputs[kOutput], outputDims(node, args));
  if (flashDtype(outputs[kOutput].type) != static_cast<FlashDtype>(args.dtype)) {
    refuse(node, "output", textOf(outputs[kOutput].type), "the query's dtype");
  }
  if (!hasSideInputs(node.op)) return;
  requireLinear(node, "lse", outputs[kLse]);
  requireShape(node, "lse", outputs[kLse], {3, {args.batch, args.q_num_heads, args.seqlen_q}});
  if (outputs[kLse].type != DataType::kFLOAT) refuse(node, "lse", textOf(outputs[kLse].type), "fp32");
}

bool isEmpty(FlashAttentionArgs const& args) { return args.batch == 0 || args.seqlen_q == 0; }

void bindAddresses(Node const& node, FlashAttentionArgs& args, void const* const* inputs,
                   void* const* outputs) {
  auto const address = [&](int32_t input, bool hasElements) {
    if (inputs[input] == nullptr && hasElements) {
      refuse(node, inputName(node.op, input), "a null address", "the address of its elements");
    }
    return const_cast<void*>(inputs[input]);
  };
  bool const hasKeys = args.seqlen_kv > 0;
  args.query.data = address(kQuery, true);
  if (node.op == Operator::kFlashAttentionPacked) {
    char* const qkv = static_cast<char*>(args.query.data);
    int64_t const headSize = args.head_dim * static_cast<int64_t>(elementSize(args.dtype));
    args.key.data = qkv + args.q_num_heads * headSize;
    args.value.data = qkv + (args.q_num_heads + args.kv_num_heads) * headSize;
  } else {
    args.key.data = address(keysOf(node.op), hasKeys);
    args.value.data = address(valuesOf(node.op), hasKeys);
  }
  if (args.bias != nullptr) args.bias = address(kBias, hasKeys);
  if (args.kv_lengths != nullptr) args.kv_lengths = static_cast<int32_t const*>(address(kKvLengths, true));
  if (args.page_table != nullptr) {
    args.page_table = static_cast<int32_t const*>(address(kPageTable, hasKeys));
  }
  if (args.sinks != nullptr) args.sinks = static_cast<float const*>(address(kSinks, true));

  if (outputs[kOutput] == nullptr) {
    refuse(node, "output", "a null address", "the address of its elements");
  }
  args.output.data = outputs[kOutput];
  if (args.lse == nullptr) return;
  if (outputs[kLse] == nullptr) refuse(node, "lse", "a null address", "the address of its elements");
  args.lse = static_cast<float*>(outputs[kLse]);
}

}  // namespace flash_export
