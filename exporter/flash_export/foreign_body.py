# SPDX-License-Identifier: Apache-2.0
"""Whether the body that a file gives FlashAttention is ours: a runtime without the plugin computes what it says."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from flash_export.errors import UserError
from flash_export.function_body import functions_for
from flash_export.op import DOMAIN, FLOAT_ATTRIBUTES, INT_ATTRIBUTES, OPERATORS, Attributes
from flash_export.shapes import Shapes


def foreign_bodies(model: ir.Model, shapes: Shapes) -> set[str]:
    """The operators whose body in ``model`` is not the one that flash-export writes for the nodes of its main graph.

    Names of values do not count, and no overload is ours. Nodes whose attributes break the contract are passed over:
    they are refused anyway.
    """
    bodies = [f for f in model.functions.values() if f.domain == DOMAIN and f.name in OPERATORS]
    overloaded = {f.name for f in bodies if f.overload}
    written = {f.name: f for f in bodies if f.name not in overloaded}
    nodes = [n for n in model.graph if n.domain == DOMAIN and n.op_type in written]
    try:
        expected = {f.name: f for f in functions_for(_complete(nodes, shapes), model.opset_imports.get("", 1))}
    except UserError:
        # No body can be written for these nodes, so none that is there is ours.
        return {node.op_type for node in nodes} | overloaded
    return overloaded | {name for name, ours in expected.items() if told(ours) != told(written[name])}


def _complete(nodes: Iterable[ir.Node], shapes: Shapes) -> list[ir.Node]:
    """The nodes with every attribute written out and the types of their inputs."""
    result = []
    for node in nodes:
        names = INT_ATTRIBUTES | FLOAT_ATTRIBUTES
        try:
            attributes = Attributes(**{n: node.attributes[n].value for n in names if n in node.attributes})
        except (TypeError, ValueError):
            continue
        inputs = [None if v is None else ir.Value(type=ir.TensorType(_dtype(v, shapes))) for v in node.inputs]
        result.append(ir.node(node.op_type, inputs, dict(attributes.as_dict()), domain=DOMAIN))
    return result


def _dtype(value: ir.Value, shapes: Shapes) -> ir.DataType:
    return shapes.dtype(value) or ir.DataType.UNDEFINED


def told(graph: ir.Graph | ir.Function) -> list[object]:
    """The graph or function with its values numbered in the order in which they appear, and its weights' contents."""
    numbers: dict[ir.Value | None, int] = {None: -1}
    weights: dict[int, object] = {}

    def number(value: ir.Value | None) -> int:
        at = numbers.setdefault(value, len(numbers))
        if value is not None and value.is_initializer() and value.const_value is not None:
            weights.setdefault(at, _content(value.const_value))
        return at

    inputs = [number(v) for v in graph.inputs]
    nodes: list[object] = []
    for node in graph:
        attributes = sorted((name, _plain(a)) for name, a in node.attributes.items())
        reads, writes = [number(v) for v in node.inputs], [number(v) for v in node.outputs]
        nodes.append((node.domain, node.op_type, node.overload, reads, writes, attributes))
    return [inputs, nodes, [number(v) for v in graph.outputs], weights]


def _plain(attribute: ir.Attr) -> bytes:
    """The attribute as bytes, without the names of tensors and values inside it."""
    if attribute.is_ref():
        return f"ref {attribute.ref_attr_name}".encode()
    if attribute.type == ir.AttributeType.TENSOR:
        return _content(attribute.as_tensor())
    return repr(attribute.value).encode()


def _content(tensor: ir.TensorProtocol) -> bytes:
    if tensor.dtype == ir.DataType.STRING:  # which no body of ours holds
        return repr(list(tensor.numpy().ravel())).encode()
    return repr((tensor.dtype, tuple(tensor.shape))).encode() + tensor.tobytes()
