// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "describe.h"
#include "log.h"

namespace flash_export {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

constexpr char const* kFixShapes = "correct the model or the shapes given to it; docs/op.md has the rules";

// Stands for the address of a side input while only shapes are known. Never read.
float const kPlaceholder = 0.0f;

std::string whereOf(Node const& node, char const* tensor) {
  return "node \"" + node.layer + "\", tensor " + tensor;
}

[[noreturn]] void refuse(Node const& node, char const* tensor, std::string const& got,
                         std::string const& need) {
  throw PluginError(std::string{"cannot run "} + infoOf(node.op).name, whereOf(node, tensor), got, need,
                    kFixShapes);
}

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
      return "int32";
    case kSinks:
      return "fp32";
    default:
      return "the query's dtype";
  }
}

// Throws where a dimension is not known or where 64 bits do not hold the strides, which a dimension of 0 must
// not hide.
void requireCountable(Node const& node, char const* tensor, Dims const& dims) {
  if (dims.nbDims < 0 || dims.nbDims > Dims::MAX_DIMS) refuse(node, tensor, "no shape", "a known rank");
  int64_t count = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) {
    if (dims.d[i] < 0 || __builtin_mul_overflow(count, std::max<int64_t>(dims.d[i], 1), &count)) {
      refuse(node, tensor, "shape " + textOf(dims), "known dimensions whose product fits 63 bits");
    }
  }
}

void requireShape(Node const& node, char const* tensor, PluginTensorDesc const& desc, Dims const& need) {
  bool same = desc.dims.nbDims == need.nbDims;
  for (int32_t i = 0; same && i < need.nbDims; ++i) same = desc.dims.d[i] == need.d[i];
  if (!same) refuse(node, tensor, "shape " + textOf(desc.dims), "shape " + textOf(need));
}

void requireLinear(Node const& node, char const* tensor, PluginTensorDesc const& desc) {
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) {
    refuse(node, tensor, "tensor format " + std::to_string(static_cast<int32_t>(desc.format)),
           "the linear format");
  }
}

// One of query, key, value in either layout.
struct HeadTensor {
  int64_t batch;
  int64_t seqlen;
  int64_t head_dim;
};

HeadTensor readHeadTensor(Node const& node, int32_t input, Dims const& dims, int32_t heads) {
  char const* const name = inputName(node.op, input);
  std::string const headsText = std::to_string(heads);
  if (node.params.layout == 1) {
    if (dims.nbDims != 4 || dims.d[1] != heads) {
      refuse(node, name, "shape " + textOf(dims), "[B, " + headsText + ", S, D] (layout 1)");
    }
    return {dims.d[0], dims.d[2], dims.d[3]};
  }
  if (dims.nbDims != 3 || dims.d[2] % heads != 0) {
    refuse(node, name, "shape " + textOf(dims), "[B, S, " + headsText + "*D] (layout 0)");
  }
  return {dims.d[0], dims.d[1], dims.d[2] / heads};
}

FlashTensor stridesOf(int32_t layout, int64_t heads, int64_t seqlen, int64_t head_dim) {
  if (layout == 1) return {nullptr, heads * seqlen * head_dim, seqlen * head_dim, head_dim};
  return {nullptr, seqlen * heads * head_dim, head_dim, heads * head_dim};
}

int32_t narrow(Node const& node, char const* tensor, char const* axis, int64_t value) {
  if (value > std::numeric_limits<int32_t>::max()) {
    refuse(node, tensor, std::string{axis} + " " + std::to_string(value), "at most 2147483647");
  }
  return static_cast<int32_t>(value);
}

void readSeparate(Node const& node, PluginTensorDesc const* inputs, FlashAttentionArgs& args) {
  Params const& params = node.params;
  HeadTensor const query = readHeadTensor(node, kQuery, inputs[kQuery].dims, params.q_num_heads);
  HeadTensor const key = readHeadTensor(node, kKey, inputs[kKey].dims, params.kv_num_heads);
  HeadTensor const value = readHeadTensor(node, kValue, inputs[kValue].dims, params.kv_num_heads);
  if (key.batch != query.batch || key.head_dim != query.head_dim) {
    refuse(
        node, "key", "batch " + std::to_string(key.batch) + ", head dim " + std::to_string(key.head_dim),
        "the query's: batch " + std::to_string(query.batch) + ", head dim " + std::to_string(query.head_dim));
  }
  if (value.batch != query.batch || value.seqlen != key.seqlen) {
    refuse(node, "value",
           "batch " + std::to_string(value.batch) + ", sequence " + std::to_string(value.seqlen),
           "the key's: batch " + std::to_string(key.batch) + ", sequence " + std::to_string(key.seqlen));
  }
  args.batch = narrow(node, "query", "batch", query.batch);
  args.head_dim = narrow(node, "query", "head dim", query.head_dim);
  args.v_head_dim = narrow(node, "value", "head dim", value.head_dim);
  args.seqlen_q = query.seqlen;
  args.seqlen_kv = key.seqlen;
  args.query = stridesOf(params.layout, params.q_num_heads, query.seqlen, query.head_dim);
  args.key = stridesOf(params.layout, params.kv_num_heads, key.seqlen, key.head_dim);
  args.value = stridesOf(params.layout, params.kv_num_heads, value.seqlen, value.head_dim);
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
  if (position < inputs && position == kKvLengths) return dtype == DataType::kINT32;
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
  DataType dtypes[kSinks + 1];
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
  if (node.op == Operator::kFlashAttentionEx) readSideInputs(node, inputs, args);
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
  int64_t const batch =
      std::min({inputs[kQuery].dims.d[0], inputs[kKey].dims.d[0], inputs[kValue].dims.d[0]});
  for (int32_t i : {kQuery, kKey, kValue}) inputs[i].dims.d[0] = batch;
  int64_t const seqlen_kv = std::min(inputs[kKey].dims.d[sequence], inputs[kValue].dims.d[sequence]);
  inputs[kKey].dims.d[sequence] = inputs[kValue].dims.d[sequence] = seqlen_kv;
  if (node.op != Operator::kFlashAttentionEx) return;

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
  if (node.op != Operator::kFlashAttentionEx) return;
  requireLinear(node, "lse", outputs[kLse]);
  requireShape(node, "lse", outputs[kLse], {3, {args.batch, args.q_num_heads, args.seqlen_q}});
  if (outputs[kLse].type != DataType::kFLOAT) refuse(node, "lse", textOf(outputs[kLse].type), "fp32");
}

bool isEmpty(FlashAttentionArgs const& args) {
  // An output without columns may still have an lse with elements.
  return args.batch == 0 || args.seqlen_q == 0 || (args.v_head_dim == 0 && args.lse == nullptr);
}

void bindAddresses(Node const& node, FlashAttentionArgs& args, void const* const* inputs,
                   void* const* outputs) {
  auto const address = [&](int32_t input, bool hasElements) {
    if (inputs[input] == nullptr && hasElements) {
      refuse(node, inputName(node.op, input), "a null address", "the address of its elements");
    }
    return const_cast<void*>(inputs[input]);
  };
  bool const hasKeys = args.seqlen_kv > 0;
  args.query.data = address(kQuery, args.head_dim > 0);
  if (node.op == Operator::kFlashAttentionPacked) {
    char* const qkv = static_cast<char*>(args.query.data);
    int64_t const headSize = args.head_dim * static_cast<int64_t>(elementSize(args.dtype));
    args.key.data = qkv + args.q_num_heads * headSize;
    args.value.data = qkv + (args.q_num_heads + args.kv_num_heads) * headSize;
  } else {
    args.key.data = address(kKey, hasKeys && args.head_dim > 0);
    args.value.data = address(kValue, hasKeys && args.v_head_dim > 0);
  }
  if (args.bias != nullptr) args.bias = address(kBias, hasKeys);
  if (args.kv_lengths != nullptr) args.kv_lengths = static_cast<int32_t const*>(address(kKvLengths, true));
  if (args.sinks != nullptr) args.sinks = static_cast<float const*>(address(kSinks, true));

  if (outputs[kOutput] == nullptr && args.v_head_dim > 0) {
    refuse(node, "output", "a null address", "the address of its elements");
  }
  args.output.data = outputs[kOutput];
  if (args.lse == nullptr) return;
  if (outputs[kLse] == nullptr) refuse(node, "lse", "a null address", "the address of its elements");
  args.lse = static_cast<float*>(outputs[kLse]);
}

}  // namespace flash_export
