// SPDX-License-Identifier: Apache-2.0
#include "cache.h"

#include "describe.h"
#include "head_tensors.h"
#include "log.h"

namespace flash_export {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginTensorDesc;

// A new key or value against the cache that it goes into.
HeadTensor readNew(Node const& node, PluginTensorDesc const* inputs, int32_t input, int64_t head_dim,
                   int32_t batch) {
  HeadTensor const fresh = readHeadTensor(node, input, inputs[input].dims, node.params.kv_num_heads);
  if (fresh.batch != batch || fresh.head_dim != head_dim) {
    refuse(node, inputName(node.op, input),
           "batch " + std::to_string(fresh.batch) + ", head dim " + std::to_string(fresh.head_dim),
           "the query's and the cache's: batch " + std::to_string(batch) + ", head dim " +
               std::to_string(head_dim));
  }
  return fresh;
}

void* address(Node const& node, char const* tensor, void const* given, bool hasElements) {
  if (given == nullptr && hasElements) {
    refuse(node, tensor, "a null address", "the address of its elements");
  }
  return const_cast<void*>(given);
}

// The one memory of a cache that is input and output.
void* cacheAddress(Node const& node, int32_t output, void const* const* inputs, void* const* outputs,
                   bool hasElements) {
  int32_t const input = aliasedInput(node.op, output);
  void* const memory = address(node, inputName(node.op, input), inputs[input], hasElements);
  if (hasElements && outputs[output] != memory) {
    throw PluginError(
        std::string{"cannot run "} + infoOf(node.op).name + " in place",
        "node \"" + node.layer + "\", tensor " + outputName(output),
        std::string{"other memory than that of "} + inputName(node.op, input), "the same memory",
        "build the engine with the preview feature kALIASED_PLUGIN_IO_10_03, as flash-trt does");
  }
  return memory;
}

}  // namespace

FlashAppendArgs readAppend(Node const& node, PluginTensorDesc const* inputs, FlashAttentionArgs const& args) {
  HeadTensor const key = readNew(node, inputs, kKey, args.head_dim, args.batch);
  HeadTensor const value = readNew(node, inputs, kValue, args.v_head_dim, args.batch);
  if (value.seqlen != key.seqlen) {
    refuse(node, "value", "sequence " + std::to_string(value.seqlen),
           "the key's: sequence " + std::to_string(key.seqlen));
  }
  FlashAppendArgs append{};
  append.dtype = args.dtype;
  append.batch = args.batch;
  append.kv_num_heads = args.kv_num_heads;
  append.head_dim = args.head_dim;
  append.v_head_dim = args.v_head_dim;
  append.page_size = args.page_size;
  append.page_count = args.page_count;
  append.seqlen_new = key.seqlen;
  append.capacity = args.seqlen_kv;
  append.key = stridesOf(node.params.layout, args.kv_num_heads, key.seqlen, args.head_dim);
  append.value = stridesOf(node.params.layout, args.kv_num_heads, key.seqlen, args.v_head_dim);
  append.key_cache = args.key;
  append.value_cache = args.value;
  append.kv_lengths = args.kv_lengths;
  append.kv_lengths_stride = args.kv_lengths_stride;
  append.page_table = args.page_table;
  append.page_table_stride = args.page_table_stride;
  return append;
}

void checkAppendSupported(Node const& node, FlashAppendArgs const& append) {
  char reasons[1024];
  if (flashAttentionAppendWhyUnsupported(&append, reasons, sizeof reasons) == 0) return;
  throw PluginError(std::string{"cannot run "} + infoOf(node.op).name, "node \"" + node.layer + "\"", reasons,
                    "a cache that the kernels write", "change what the reason names");
}

void checkCacheOutputs(Node const& node, FlashAttentionArgs const& args, PluginTensorDesc const* inputs,
                       PluginTensorDesc const* outputs) {
  requireLinear(node, "kv_lengths_out", outputs[kKvLengthsOut]);
  requireShape(node, "kv_lengths_out", outputs[kKvLengthsOut], {1, {args.batch}});
  if (outputs[kKvLengthsOut].type != DataType::kINT32) {
    refuse(node, "kv_lengths_out", textOf(outputs[kKvLengthsOut].type), "int32");
  }
  for (int32_t output : {kKeyCacheOut, kValueCacheOut}) {
    PluginTensorDesc const& cache = inputs[aliasedInput(node.op, output)];
    requireLinear(node, outputName(output), outputs[output]);
    requireShape(node, outputName(output), outputs[output], cache.dims);
    if (outputs[output].type != cache.type) {
      refuse(node, outputName(output), textOf(outputs[output].type), textOf(cache.type));
    }
  }
}

void bindAppend(Node const& node, FlashAppendArgs& append, void const* const* inputs, void* const* outputs) {
  bool const rows = append.seqlen_new > 0;
  bool const room = append.page_table == nullptr ? append.capacity > 0 : append.page_count > 0;
  append.key.data = address(node, "key", inputs[kKey], rows);
  append.value.data = address(node, "value", inputs[kValue], rows);
  append.kv_lengths = static_cast<int32_t const*>(address(node, "kv_lengths", inputs[kKvLengths], true));
  append.lengths_after = static_cast<int32_t*>(address(node, "kv_lengths_out", outputs[kKvLengthsOut], true));
  append.key_cache.data = cacheAddress(node, kKeyCacheOut, inputs, outputs, room);
  append.value_cache.data = cacheAddress(node, kValueCacheOut, inputs, outputs, room);
  if (append.page_table == nullptr) return;
  append.page_table =
      static_cast<int32_t const*>(address(node, "page_table", inputs[kPageTable], append.capacity > 0));
}

void useLengthsAfter(FlashAttentionArgs& args, void* const* outputs) {
  args.kv_lengths = static_cast<int32_t const*>(outputs[kKvLengthsOut]);
  args.kv_lengths_stride = 1;
}

}  // namespace flash_export
