// SPDX-License-Identifier: Apache-2.0
#include "node.h"

#include <algorithm>
#include <cstring>
#include <deque>
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

// A text from a model, cut, on one line and in ASCII: half a character is no text to Python.
std::string shown(std::string text) {
  if (text.size() > 64) text = text.substr(0, 64) + "...";
  for (size_t i = text.size(); i-- > 0;) {
    auto const byte = static_cast<unsigned char>(text[i]);
    if (byte < ' ') text.replace(i, 1, byte == 0 ? "\\0" : " ");
    if (byte > '~') text[i] = '?';
  }
  return text;
}

constexpr char const* kExportAgain = "export the model again with flash-export, or correct the node";

// What an attribute is that is there; empty: nothing, or a list, of which ONNX Runtime does not tell here.
std::string attributeThere(Api const& api, KernelInfo const* info, char const* name) {
  float number = 0.0f;
  int64_t integer = 0;
  std::string text;
  if (api.attribute(info, name, integer)) return "an INT, " + std::to_string(integer);
  if (api.attribute(info, name, number)) return "a FLOAT, " + std::to_string(number);
  if (api.attribute(info, name, text)) return "a STRING, \"" + shown(text) + "\"";
  return "";
}

// The node's numbers as fields; one that is missing is left out, for readParams to name.
class Fields {
 public:
  Fields(Api const& api, KernelInfo const* info, std::string const& what, std::string const& layer)
      : mApi(api), mInfo(info), mWhat(what), mLayer(layer) {
    Params const any{};
    visitAttributes(any, [&](char const* name, auto const& member, auto smallest, auto largest) {
      read(name, member, smallest, largest);
    });
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
  }
  nvinfer1::PluginFieldCollection const* collection() const { return &mCollection; }

 private:
  void read(char const* name, int32_t, int32_t smallest, int32_t largest) {
    std::string const need = "one INT in " + std::to_string(smallest) + " to " + std::to_string(largest);
    int64_t value = 0;
    if (!mApi.attribute(mInfo, name, value)) return refuseOther(name, need);
    if (value < smallest || value > largest)
      refuse(name, std::to_string(value), need);  // 64 bits, not yet 32
    mInts.push_back(static_cast<int32_t>(value));
    mFields.emplace_back(name, &mInts.back(), PluginFieldType::kINT32, 1);
  }
  void read(char const* name, float, float, float) {
    float value = 0.0f;
    if (!mApi.attribute(mInfo, name, value)) return refuseOther(name, "one FLOAT");
    mFloats.push_back(value);
    mFields.emplace_back(name, &mFloats.back(), PluginFieldType::kFLOAT32, 1);
  }
  void refuseOther(char const* name, std::string const& need) const {
    std::string const there = attributeThere(mApi, mInfo, name);
    if (!there.empty()) refuse(name, there, need);
  }
  [[noreturn]] void refuse(char const* name, std::string const& got, std::string const& need) const {
    throw PluginError(mWhat, whereOf(mLayer) + ", attribute " + name, got, need, kExportAgain);
  }

  Api const& mApi;
  KernelInfo const* mInfo;
  std::string const& mWhat;
  std::string const& mLayer;
  std::deque<int32_t> mInts;  // a deque: the fields point into it
  std::deque<float> mFloats;
  std::vector<PluginField> mFields;
  nvinfer1::PluginFieldCollection mCollection{};
};

void requireVersion(Api const& api, KernelInfo const* info, std::string const& what,
                    std::string const& layer) {
  std::string version;
  bool const found = api.attribute(info, "plugin_version", version);
  if (found && version == kVersion) return;
  std::string const there = found ? "version " + shown(version) : attributeThere(api, info, "plugin_version");
  throw PluginError(what, whereOf(layer) + ", attribute plugin_version", there.empty() ? "none" : there,
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

// One of the node's tensors in memory.
struct Place {
  char const* name;
  void const* start;
  int64_t bytes;
};

bool overlap(Place const& a, Place const& b) {
  auto const first = reinterpret_cast<uintptr_t>(a.start), second = reinterpret_cast<uintptr_t>(b.start);
  return a.bytes > 0 && b.bytes > 0 && first < second + uint64_t(b.bytes) &&
         second < first + uint64_t(a.bytes);
}

// The input whose memory an output may be, all of it; -1: none.
int32_t ownInput(Operator op, int32_t output) {
  return isCache(op) && output == kKvLengthsOut ? int32_t{kKvLengths} : aliasedInput(op, output);
}

// An output is its own input's memory, where the caller bound it so, or memory that no other tensor has.
void requireApart(Node const& node, std::vector<Place> const& inputs, std::vector<Place> const& outputs) {
  for (size_t o = 0; o < outputs.size(); ++o) {
    Place const& output = outputs[o];
    int32_t const own = ownInput(node.op, int32_t(o));
    auto const refuse = [&](char const* other) {
      std::string const input =
          own < 0 ? "" : std::string{"the memory of "} + inputName(node.op, own) + ", or ";
      throw PluginError(std::string{"cannot run "} + infoOf(node.op).name,
                        whereOf(node.layer) + ", tensor " + output.name,
                        std::string{"memory that "} + other + " has too", input + "memory of its own",
                        own < 0 ? "bind the output to another array"
                                : "bind the output to its own input, or to another array");
    };
    for (size_t i = 0; i < inputs.size(); ++i) {
      bool const in_place =
          int32_t(i) == own && inputs[i].start == output.start && inputs[i].bytes == output.bytes;
      if (!in_place && overlap(inputs[i], output)) refuse(inputs[i].name);
    }
    for (size_t other = 0; other < outputs.size(); ++other) {
      if (other != o && overlap(outputs[other], output)) refuse(outputs[other].name);
    }
  }
}

PluginTensorDesc describeOutput(Node const& node, Variant const& variant, PluginTensorDesc const* inputs,
                                FlashAttentionArgs const& args, int32_t output) {
  PluginTensorDesc desc{};
  desc.type = dataType(outputType(variant, size_t(output)));
  switch (output) {
    case kOutput:
      desc.dims = outputDims(node, args);
      break;
    case kLse:
      desc.dims = {3, {args.batch, args.q_num_heads, args.seqlen_q}};
      break;
    case kKvLengthsOut:
      desc.dims = {1, {args.batch}};
      break;
    default:
      desc.dims = inputs[aliasedInput(node.op, output)].dims;
  }
  return desc;
}

// Makes the outputs; none is written yet.
void makeOutputs(Node const& node, Variant const& variant, PluginTensorDesc const* descs,
                 FlashAttentionArgs const& args, Api const& api, Context* context, void const* const* in,
                 void** out) {
  std::vector<Place> inputs, outputs;
  for (int32_t i = 0; i < infoOf(node.op).inputs; ++i) {
    inputs.push_back({inputName(node.op, i), in[i], bytesOf(descs[i])});
  }
  for (int32_t o = 0; o < infoOf(node.op).outputs; ++o) {
    PluginTensorDesc const desc = describeOutput(node, variant, descs, args, o);
    out[o] = api.data(api.output(context, size_t(o), desc.dims.d, size_t(desc.dims.nbDims)));
    outputs.push_back({outputName(o), out[o], bytesOf(desc)});
  }
  requireApart(node, inputs, outputs);
}

// Writes the cache form's outputs from kv_lengths_out on: in place where they are the inputs' memory, as
// copies where they are not. From then on the caches of `in` are those of `out`.
void appendToCaches(Node const& node, PluginTensorDesc const* descs, FlashAppendArgs append,
                    Parallel const& parallel, void const** in, void* const* out) {
  for (int32_t output : {kKeyCacheOut, kValueCacheOut}) {
    int32_t const input = aliasedInput(node.op, output);
    copyCache(out[output], in[input], bytesOf(descs[input]), parallel);
    in[input] = out[output];
  }
  if (append.batch == 0) return;
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
  FlashAppendArgs append{};
  if (isCache(node.op)) {
    append = readAppend(node, descs, args);
    checkAppendSupported(node, append);
  }
  void* out[kValueCacheOut + 1] = {};
  makeOutputs(node, variant, descs, args, api, context, in, out);

  SessionThreads threads{api, context};
  Parallel const parallel{&threads, runOnSessionThreads};
  if (isCache(node.op)) appendToCaches(node, descs, append, parallel, in, out);
  if (isEmpty(args)) return;
  bindAddresses(node, args, in, out);
  if (isCache(node.op)) useLengthsAfter(args, out);
  attention(args, parallel, kernels);
}

}  // namespace flash_export::cpu
