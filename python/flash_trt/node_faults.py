# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a FlashAttention node that a checker or a runtime refuses without naming it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnx.inliner

from flash_export import call_count
from flash_export.errors import UnsupportedModel, UsageError
from flash_export.op import DOMAIN, FLOAT_ATTRIBUTES, INT_ATTRIBUTES, OPERATORS, STRING_ATTRIBUTES
from flash_trt.onnx_file import graphs_of

_TYPES = {
    **dict.fromkeys(INT_ATTRIBUTES, onnx.AttributeProto.INT),
    **dict.fromkeys(FLOAT_ATTRIBUTES, onnx.AttributeProto.FLOAT),
    **dict.fromkeys(STRING_ATTRIBUTES, onnx.AttributeProto.STRING),
}
_INT32, _FLOAT = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT
_QUERY = (_FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_FIXED = {"kv_lengths": _INT32, "page_table": _INT32, "sinks": _FLOAT}


def attribute_fault(path: Path) -> UsageError | None:
    """The first attribute, of any FlashAttention node, that is unknown, missing, there twice or of another type.

    None where there is none, or the file is no model.
    """
    proto = _proto(path)
    for node in _nodes(proto) if proto else ():
        for name, got, need in _attribute_faults(node):
            return UsageError(
                "a FlashAttention node's attributes are not the operator's",
                where=f'{path}, node "{node.name or ", ".join(node.output)}", attribute {name}',
                got=got,
                need=need,
                do="export the model again with flash-export, or correct the node; docs/op.md has the attributes",
            )
    return None


def dtype_fault(path: Path) -> UnsupportedModel | None:
    """The first input, of any FlashAttention node that runs, whose type the operator does not take.

    None where there is none as far as the types are known, or the file is no model.
    """
    proto = _proto(path)
    for node, types in _typed_nodes(proto) if proto else ():
        tensors = OPERATORS[node.op_type].inputs
        query = next(iter(types), 0)
        for tensor, value, got in zip(tensors, node.input, types, strict=False):
            need, words = _allowed(tensor, query)
            if got and got not in need:
                return UnsupportedModel(
                    "a FlashAttention node's tensor is of a type that the operator does not take",
                    where=f'{path}, node "{node.name or ", ".join(node.output)}", tensor {tensor} ("{value}")',
                    got=_name(got),
                    need=words,
                    do="cast it before the node, or export the model again; docs/op.md has the types",
                )
    return None


def _allowed(tensor: str, query: int) -> tuple[tuple[int, ...], str]:
    if tensor in _FIXED:
        return (_FIXED[tensor],), _name(_FIXED[tensor])
    if tensor in ("query", "qkv") or query not in _QUERY:
        return _QUERY, "FLOAT, FLOAT16 or BFLOAT16"
    if tensor == "bias":
        return (query, _FLOAT), f"the query's type, {_name(query)}" + (", or FLOAT" if query != _FLOAT else "")
    return (query,), f"the query's type, {_name(query)}"


def _name(dtype: int) -> str:
    return str(onnx.TensorProto.DataType.Name(dtype)) if dtype in onnx.TensorProto.DataType.values() else str(dtype)


def _attribute_faults(node: onnx.NodeProto) -> Iterator[tuple[str, str, str]]:
    """Attribute, what is there, what should be."""
    seen: set[str] = set()
    for attribute in node.attribute:
        if attribute.name not in _TYPES:
            yield attribute.name, "an attribute that the operator does not have", f"only {', '.join(_TYPES)}"
        elif attribute.name in seen:
            yield attribute.name, "it twice", "each attribute once"
        elif attribute.type != _TYPES[attribute.name]:
            there = onnx.AttributeProto.AttributeType.Name(attribute.type)
            yield attribute.name, f"one of type {there}", _needed(attribute.name)
        seen.add(attribute.name)
    for name in _TYPES.keys() - seen:
        yield name, "none", _needed(name)


def _needed(name: str) -> str:
    if name in STRING_ATTRIBUTES:
        return f'the STRING "{STRING_ATTRIBUTES[name]}"'
    kind, (least, most) = ("INT", INT_ATTRIBUTES[name]) if name in INT_ATTRIBUTES else ("FLOAT", FLOAT_ATTRIBUTES[name])
    return f"one {kind} from {least:g} to {most:g}" if kind == "FLOAT" else f"one {kind} from {least} to {most}"


def _proto(path: Path) -> onnx.ModelProto | None:
    try:
        return onnx.load(str(path), format="protobuf", load_external_data=False)
    except Exception:  # the caller has its own error of such a file
        return None


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        yield from (n for n in call_count.all_nodes(nodes) if n.domain == DOMAIN and n.op_type in OPERATORS)


def _typed_nodes(proto: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, list[int]]]:
    """Every FlashAttention node that runs, as the file has it, with its inputs' types; 0: not known.

    A node inside a called function comes once for each call, with the types of that call.
    """
    written = list(_nodes(proto))
    for index, node in enumerate(written):
        node.doc_string = str(index)  # with the calls written out, other names are in its place
    for node, types in _walk(_inferred(proto), {}):
        yield written[int(node.doc_string)], [types.get(name, 0) for name in node.input]


def _inferred(proto: onnx.ModelProto) -> onnx.GraphProto:
    """The graph with the calls written out, and the types of its values as far as they are known."""
    ours = [(f.domain, f.name) for f in proto.functions if f.domain == DOMAIN]
    flat = proto
    own = {entry.domain: entry.version for entry in proto.opset_import}
    for function in proto.functions:  # of another opset it would stay a call; types are the same
        for entry in function.opset_import:
            entry.version = own.get(entry.domain, entry.version)
    try:
        flat = onnx.inliner.inline_selected_functions(proto, ours, exclude=True)
        return onnx.shape_inference.infer_shapes(flat).graph
    except Exception:  # 2 GB or more, or shapes that contradict one another
        return flat.graph


def _walk(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Iterator[tuple[onnx.NodeProto, Mapping[str, int]]]:
    """The FlashAttention nodes of a graph and of the graphs in it, each with the types of the values that it sees."""
    types = {**outer, **{tensor.name: tensor.data_type for tensor in graph.initializer}}
    for value in (*graph.input, *graph.value_info):
        types[value.name] = value.type.tensor_type.elem_type
    for node in graph.node:
        if node.domain == DOMAIN and node.op_type in OPERATORS:
            yield node, types
        for attribute in node.attribute:
            for inner in graphs_of(attribute):
                yield from _walk(inner, types)
