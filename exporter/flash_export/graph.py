# SPDX-License-Identifier: Apache-2.0
"""Small questions about an ``onnx_ir`` graph that every pattern asks: operator, attribute, constant, user."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import cast

import numpy as np
import onnx_ir as ir

from flash_export.mapped import mapped

MAX_CONSTANT_ELEMENTS = 1 << 24
"""Constants above this many elements are weights, never a scale, a shape or a mask; they are not read into memory."""

_COPIED_BYTES = 2**20
"""A constant up to this size is copied out of its file: to keep it mapped is to keep all weights mapped once more."""

_NAMED = 4
"""Outputs that a message names."""


def is_op(node: ir.Node | None, *names: str) -> bool:
    """True when ``node`` is a standard ONNX operator of one of these names."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in names


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """The value of an INT attribute, or ``default`` when it is not written."""
    attribute = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())


def ints_attribute(node: ir.Node, name: str) -> list[int] | None:
    """The value of an INTS attribute, or None when it is not written."""
    attribute = node.attributes.get(name)
    return None if attribute is None else [int(i) for i in attribute.as_ints()]


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of an initializer or a Constant node; None for anything a run can change, and for weights by size."""
    if value is None or value.is_graph_input():
        return None
    tensor = value.const_value
    producer = value.producer()
    if tensor is None and is_op(producer, "Constant"):
        assert producer is not None
        return _constant_node(producer)
    if tensor is None or tensor.size > MAX_CONSTANT_ELEMENTS:
        return None
    if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes <= _COPIED_BYTES:
        with mapped(tensor):
            return np.array(tensor.numpy())
    return np.asarray(tensor.numpy())


def tensor_of(attribute: ir.Attr) -> ir.TensorProtocol:
    """The tensor of a TENSOR attribute; onnx_ir's own accessor checks the whole protocol at every call."""
    assert attribute.type == ir.AttributeType.TENSOR
    return cast("ir.TensorProtocol", attribute.value)


def _constant_node(node: ir.Node) -> np.ndarray | None:
    for name, attribute in node.attributes.items():
        if attribute.is_ref():  # inside a function: each of its calls gives a number of its own
            return None
        if name == "value":
            tensor = tensor_of(attribute)
            return None if tensor.size > MAX_CONSTANT_ELEMENTS else np.asarray(tensor.numpy())
        if name in ("value_float", "value_floats"):
            return np.asarray(attribute.value, dtype=np.float32)
        if name in ("value_int", "value_ints"):
            return np.asarray(attribute.value, dtype=np.int64)
    return None


def is_weight(value: ir.Value) -> bool:
    """True for a constant: an initializer that no input overrides, a Constant node, or a layout of one."""
    node = value.producer()
    while is_op(node, "Transpose", "Reshape", "Identity", "Cast", "Unsqueeze", "Squeeze", "DequantizeLinear"):
        assert node is not None
        assert node.inputs[0] is not None
        value = node.inputs[0]
        node = value.producer()
    return (value.const_value is not None and not value.is_graph_input()) or is_op(node, "Constant")


def scalar(value: ir.Value | None) -> float | None:
    """The number that a one-element float constant holds, else None."""
    if value is None:
        return None
    array = constant(value)
    if array is None or array.size != 1:
        return None
    return float(array.reshape(()).astype(np.float64))


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Input ``index`` of ``node``, or None when it is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def axes_of(node: ir.Node) -> list[int] | None:
    """The axes of Squeeze, Unsqueeze or a reduction: an attribute before opset 13, an input since."""
    written = ints_attribute(node, "axes")
    if written is not None:
        return written
    array = constant(input_of(node, 1))
    return None if array is None else [int(i) for i in array.reshape(-1)]


def all_inputs(node: ir.Node) -> Iterator[ir.Value]:
    """Every value that ``node`` reads, those captured by its subgraphs included."""
    for value in node.inputs:
        if value is not None:
            yield value
    for attribute in node.attributes.values():
        for graph in graphs_of(attribute):
            yield from graph.outputs
            for inner in graph:
                yield from all_inputs(inner)


def for_outputs(values: Iterable[ir.Value], inner: Container[ir.Node] = ()) -> str:
    """`` for the output a, b`` with the names of the graph outputs made from ``values``, not by way of ``inner``.

    Empty where there are none; of more than four only the first are named.
    """
    todo, names = list(values), []
    seen, main = set(todo), None if not todo else todo[0].graph
    while todo:
        value = todo.pop()
        readers = [node for node, _ in value.uses() if node not in inner]
        if value.is_graph_output() and value.graph is main:
            names.append(str(value.name))
        elif value.is_graph_output() and main is not None:
            readers += [n for n in main.all_nodes() if value.graph in held(n)]
        new = dict.fromkeys(v for node in readers for v in node.outputs if v not in seen)
        seen.update(new)
        todo.extend(new)
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" for the output{'s' if len(names) > 1 else ''} {', '.join(sorted(names)[:_NAMED])}{more}"


def held(node: ir.Node) -> list[ir.Graph | ir.Function | None]:
    """The branches and bodies of a node."""
    return [graph for attribute in node.attributes.values() for graph in graphs_of(attribute)]


def graphs_of(attribute: ir.Attr) -> Iterable[ir.Graph]:
    """The graphs that an attribute holds."""
    if attribute.is_ref():
        return ()
    if attribute.type == ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    if attribute.type == ir.AttributeType.GRAPHS:
        return tuple(attribute.as_graphs())
    return ()


def ensure_names(graph: ir.Graph | ir.Function) -> None:
    """Gives every unnamed value a name, so that reports and checks can speak of it."""
    taken = {value.name for node in graph for value in node.outputs}
    number = 0
    for node in graph:
        for value in node.outputs:
            if value.name is None:
                while f"unnamed_{number}" in taken:
                    number += 1
                value.name = f"unnamed_{number}"
                taken.add(value.name)
