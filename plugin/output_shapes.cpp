// SPDX-License-Identifier: Apache-2.0
#include "output_shapes.h"

#include "cache.h"
#include "describe.h"
#include "log.h"

namespace flash_export {
namespace {

using nvinfer1::DimensionOperation;
using nvinfer1::DimsExprs;
using nvinfer1::IDimensionExpr;
using nvinfer1::IExprBuilder;

std::string textOf(DimsExprs const& shape) {
  nvinfer1::Dims dims{shape.nbDims, {}};
  for (int32_t i = 0; i < shape.nbDims; ++i) {
    dims.d[i] = shape.d[i]->isConstant() ? shape.d[i]->getConstantValue() : -1;
  }
  return flash_export::textOf(dims);
}

[[noreturn]] void refuse(Node const& node, int32_t input, DimsExprs const& got, std::string const& need) {
  throw PluginError(std::string{"cannot use "} + infoOf(node.op).name,
                    "node \"" + node.layer + "\", tensor " + inputName(node.op, input),
                    "shape " + textOf(got), need, "correct the model; docs/op.md has the shapes");
}

// Checks what is known of one of query, key, value, qkv.
void checkHeads(Node const& node, int32_t input, DimsExprs const& shape, int32_t heads) {
  int32_t const layout = node.params.layout;
  std::string const need = layout == 1 ? "[B, " + std::to_string(heads) + ", S, D] (layout 1)"
                                       : "[B, S, " + std::to_string(heads) + "*D] (layout 0)";
  if (shape.nbDims != (layout == 1 ? 4 : 3)) refuse(node, input, shape, need);
  IDimensionExpr const& axis = *shape.d[layout == 1 ? 1 : 2];
  if (!axis.isConstant()) return;
  bool const fits = layout == 1 ? axis.getConstantValue() == heads : axis.getConstantValue() % heads == 0;
  if (!fits) refuse(node, input, shape, need);
}

// width / heads_from * heads_to
IDimensionExpr const* rescale(IExprBuilder& builder, IDimensionExpr const& width, int32_t from, int32_t to) {
  if (from == to) return &width;
  IDimensionExpr const* const head_dim =
      builder.operation(DimensionOperation::kFLOOR_DIV, width, *builder.constant(from));
  return builder.operation(DimensionOperation::kPROD, *head_dim, *builder.constant(to));
}

}  // namespace

void writeOutputShapes(Node const& node, DimsExprs const* inputs, DimsExprs* outputs, IExprBuilder& builder) {
  Params const& params = node.params;
  DimsExprs const& query = inputs[kQuery];
  outputs[kOutput] = query;
  if (node.op == Operator::kFlashAttentionPacked) {
    int32_t const heads = params.q_num_heads + 2 * params.kv_num_heads;
    checkHeads(node, kQuery, query, heads);
    outputs[kOutput].d[2] = rescale(builder, *query.d[2], heads, params.q_num_heads);
    return;
  }
  checkHeads(node, kQuery, query, params.q_num_heads);
  checkHeads(node, kKey, inputs[kKey], params.kv_num_heads);
  checkHeads(node, kValue, inputs[kValue], params.kv_num_heads);
  if (isCache(node.op)) {
    outputs[kKvLengthsOut] = {1, {query.d[0]}};
    for (int32_t output : {kKeyCacheOut, kValueCacheOut}) {
      int32_t const input = aliasedInput(node.op, output);
      checkHeads(node, input, inputs[input], params.kv_num_heads);
      outputs[output] = inputs[input];
    }
  }
  // The last axis is the value's: its head dim may differ from the query's.
  int32_t const last = query.nbDims - 1;
  IDimensionExpr const& value_width = *inputs[kValue].d[last];
  outputs[kOutput].d[last] = params.layout == 1
                                 ? &value_width
                                 : rescale(builder, value_width, params.kv_num_heads, params.q_num_heads);
  if (hasSideInputs(node.op)) {
    IDimensionExpr const* const seqlen_q = query.d[params.layout == 1 ? 2 : 1];
    outputs[kLse] = {3, {query.d[0], builder.constant(params.q_num_heads), seqlen_q}};
  }
}

}  // namespace flash_export
