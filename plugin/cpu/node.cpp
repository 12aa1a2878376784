// SPDX-License-Identifier: Apache-2.0
#include "node.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include "append.h"
#include "attention.h"
#include "cache.h"
#include "describe.h"
#include "log.h"

namespace flash_export::cpu {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using onnxruntime::Api;
using onnxruntime::Context;
using onnxruntime::ElementType;
using onnxruntime::KernelInfo;

DataType dataType(ElementType type) {
  switch (type) {
    case onnxruntime::kFloat:
      return DataType::kFLOAT;
    case onnxruntime::kFloat16:
      return DataType::kHALF;
    case onnxruntime::kBFloat16:
      return DataType::kBF16;
    default:
      return DataType::kINT32;
  }
}

std::string whereOf(std::string const& layer) { return "node \"" + layer + "\""; }

// The node's numbers as fields; one that is missing or of another type is left out, for readParams to name.
class Fields {
 public:
  Fields(Api const& api, KernelInfo const* info, std::string const& what, std::string const& layer) {
    Params const any{};
    visitAttributes(any, [&](char const* name, auto const& member, auto smallest, auto largest) {
      read(api, info, name, member, smallest, largest, what, layer);
    });
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
  }
  nvinfer1::PluginFieldCollection const* collection() const { return &mCollection; }

 private:
  void read(Api const& api, KernelInfo const* info, char const* name, int32_t, int32_t smallest,
            int32_t largest, std::string const& what, std::string const& layer) {
    int64_t value = 0;
    if (!api.attribute(info, name, value)) return;
    if (value < smallest || value > largest) {  // Before 64 bits become 32.
      throw PluginError(what, whereOf(layer) + ", attribute " + name, std::to_string(value),
                        "one INT in " + std::to_string(smallest) + " to " + std::to_string(largest),
                        "export the model again with flash-export, or correct the node");
    }
    mInts.push_back(static_cast<int32_t>(value));
    mFields.emplace_back(name, &mInts.back(), PluginFieldType::kINT32, 1);
  }
  void read(Api const& api, KernelInfo const* info, char const* name, float, float, float, std::string const&,
            std::string const&) {
    float value = 0.0f;
    if (!api.attribute(info, name, value)) return;
    mFloats.push_back(value);
    mFields.emplace_back(name, &mFloats.back(), PluginFieldType::kFLOAT32, 1);
  }

  std::deque<int32_t> mInts;  // a deque: the fields point into it
  std::deque<float> mFloats;
  std::vector<PluginField> mFields;
  nvinfer1::PluginFieldCollection mCollection{};
};

void requireVersion(Api const& api, KernelInfo const* info, std::string const& what,
                    std::string const& layer) {
  char version[64] = "";
  bool const found = api.attribute(info, "plugin_version", version, sizeof version);
  if (found && std::strcmp(version, kVersion) == 0) return;
  throw PluginError(what, whereOf(layer) + ", attribute plugin_version",
                    found ? std::string{"version "} + version : "none",
                    std::string{"version "} + kVersion + ", which this library has",
                    "use the library of the flash-export that wrote the model, or export the model again");
}

PluginTensorDesc describe(Node const& node, Api const& api, onnxruntime::Value const* value, int32_t input,
                          ElementType type) {
  PluginTensorDesc desc{};
  desc.type = dataType(type);
  desc.format = nvinfer1::TensorFormat::kLINEAR;
  size_t const rank = api.shape(value, desc.dims.d, Dims::MAX_DIMS);
  if (rank > size_t{Dims::MAX_DIMS}) {
    throw PluginError(std::string{"cannot run "} + infoOf(node.op).name,
                      whereOf(node.layer) + ", tensor " + inputName(node.op, input),
                      "rank " + std::to_string(rank), "rank 4 at most",
                      "correct the model or the inputs given to it; docs/op.md has the rules");
  }
  desc.dims.nbDims = static_cast<int32_t>(rank);
  return desc;
}

// The host's threads: the pool of the InferenceSession that runs the node.
struct SessionThreads {
  Api const& api;
  Context const* context;
};

void runOnSessionThreads(void* host, void (*body)(void*, size_t), size_t count, void* user) {
  SessionThreads const& threads = *static_cast<SessionThreads const*>(host);
  threads.api.parallelFor(threads.context, body, count, count, user);
}

int64_t bytesOf(PluginTensorDesc const& desc) {
  uint64_t count = desc.type == DataType::kFLOAT || desc.type == DataType::kINT32 ? 4 : 2;
  for (int32_t i = 0; i < desc.dims.nbDims; ++i) count *= uint64_t(desc.dims.d[i]);
  return int64_t(count);
}

bool overlap(void const* a, int64_t a_bytes, void const* b, int64_t b_bytes) {
  auto const first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && first < second + uint64_t(b_bytes) &&
         second < first + uint64_t(a_bytes);
}

// A cache's output is the memory of its input, where the caller bound it so, or memory that nobody else has.
void requireApart(Node const& node, PluginTensorDesc const* descs, void const* const* in, void* const* out) {
  for (int32_t output : {kKeyCacheOut, kValueCacheOut}) {
    int32_t const own = aliasedInput(node.op, output);
    int64_t const bytes = bytesOf(descs[own]);
    auto const refuse = [&](char const* other) {
      throw PluginError(std::string{"cannot run "} + infoOf(node.op).name,
                        whereOf(node.layer) + ", tensor " + outputName(output),
                        std::string{"memory that "} + other + " has too",
                        std::string{"the memory of "} + inputName(node.op, own) + ", or memory of its own",
                        "bind each cache's output to its own input, or to another array");
    };
    for (int32_t i = 0; i < infoOf(node.op).inputs; ++i) {
      bool const in_place = i == own && in[i] == out[output];
      if (!in_place && overlap(in[i], bytesOf(descs[i]), out[output], bytes)) refuse(inputName(node.op, i));
    }
    int32_t const other = output == kKeyCacheOut ? kValueCacheOut : kKeyCacheOut;
    if (overlap(out[other], bytesOf(descs[aliasedInput(node.op, other)]), out[output], bytes)) {
      refuse(outputName(other));
    }
  }
}

// Makes the cache form's outputs from kv_lengths_out on: in place where they are the inputs' memory, as
// copies where they are not. From then on the caches of `in` are those of `out`.
void appendToCaches(Node const& node, PluginTensorDesc const* descs, FlashAttentionArgs const& args,
                    Api const& api, Context* context, Parallel const& parallel, void const** in, void** out) {
  FlashAppendArgs append = readAppend(node, descs, args);
  checkAppendSupported(node, append);
  int64_t const batch = args.batch;
  out[kKvLengthsOut] = api.data(api.output(context, kKvLengthsOut, &batch, 1));
  for (int32_t output : {kKeyCacheOut, kValueCacheOut}) {
    Dims const& shape = descs[aliasedInput(node.op, output)].dims;
    out[output] = api.data(api.output(context, size_t(output), shape.d, size_t(shape.nbDims)));
  }
  requireApart(node, descs, in, out);
  for (int32_t output : {kKeyCacheOut, kValueCacheOut}) {
    int32_t const input = aliasedInput(node.op, output);
    copyCache(out[output], in[input], bytesOf(descs[input]), parallel);
    in[input] = out[output];
  }
  if (batch == 0) return;
  bindAppend(node, append, in, out);
  flash_export::cpu::append(append);
}

}  // namespace

ElementType inputType(Variant const& variant, size_t index) {
  switch (index) {
    case kBias:
      return variant.bias_dtype;
    case kKvLengths:
    case kPageTable:
      return onnxruntime::kInt32;
    case kSinks:
      return onnxruntime::kFloat;
    default:
      return variant.dtype;
  }
}

ElementType outputType(Variant const& variant, size_t index) {
  if (index == kLse) return onnxruntime::kFloat;
  return index == kKvLengthsOut ? onnxruntime::kInt32 : variant.dtype;
}

Node readNode(Operator op, Api const& api, KernelInfo const* info) {
  char layer[256] = "";
  api.nodeName(info, layer, sizeof layer);  // A longer name stays empty: it is for messages alone.
  std::string const what = std::string{"cannot create "} + infoOf(op).name;
  requireVersion(api, info, what, layer);
  return {op, readParams(op, Fields(api, info, what, layer).collection(), layer), layer};
}

void runNode(Node const& node, Variant const& variant, Kernels const& kernels, Api const& api,
             Context* context) {
  size_t const inputs = size_t(infoOf(node.op).inputs);
  PluginTensorDesc descs[kPageTable + 1];
  void const* in[kPageTable + 1];
  for (size_t i = 0; i < inputs; ++i) {
    onnxruntime::Value const* const value = api.input(context, i);
    descs[i] = describe(node, api, value, int32_t(i), inputType(variant, i));
    in[i] = api.data(value);
  }
  FlashAttentionArgs args = readProblem(node, descs);
  checkSupported(node, args);

  SessionThreads threads{api, context};
  Parallel const parallel{&threads, runOnSessionThreads};
  Dims const shape = outputDims(node, args);
  void* out[kValueCacheOut + 1] = {api.data(api.output(context, kOutput, shape.d, size_t(shape.nbDims)))};
  if (hasSideInputs(node.op)) {
    int64_t const rows[] = {args.batch, args.q_num_heads, args.seqlen_q};
    out[kLse] = api.data(api.output(context, kLse, rows, 3));
  }
  if (isCache(node.op)) appendToCaches(node, descs, args, api, context, parallel, in, out);
  if (isEmpty(args)) return;
  bindAddresses(node, args, in, out);
  if (isCache(node.op)) useLengthsAfter(args, out);
  attention(args, parallel, kernels);
}

}  // namespace flash_export::cpu
