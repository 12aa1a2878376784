# SPDX-License-Identifier: Apache-2.0
"""What each input of a graph is for, read from where it flows: an index, a mask, a length, a size, or a number.

Random numbers only make a fair test when they respect the role: a token id past the end of its table is an error,
and a mask of random integers masks nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.contrib_product import CONTRIB_DOMAIN
from flash_export.length_roles import Span, span_of, span_of_compared
from flash_export.shapes import Shapes

Kind = Literal["index", "mask", "length", "size", "number"]

_INDEXED_BY = {
    ("", "Gather"): {1: 0},
    ("", "GatherElements"): {1: 0},
    ("", "GatherND"): {1: 0},
    ("", "ScatterElements"): {1: 0},
    ("", "ScatterND"): {1: 0},
    ("", "RotaryEmbedding"): {3: 1},
    (CONTRIB_DOMAIN, "EmbedLayerNormalization"): {0: 2, 1: 4},
    (CONTRIB_DOMAIN, "GroupQueryAttention"): {9: 7},
    (CONTRIB_DOMAIN, "RotaryEmbedding"): {1: 2},
}
"""Operator -> {operand that holds indices: operand that holds the table}."""

_KNOWN = ("", "ai.onnx", CONTRIB_DOMAIN)
"""The domains whose operators are what their names say."""

_KEEPS_VALUES = {
    "Cast", "Clip", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Max", "Min",
    "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
"""The output holds numbers of the input, whatever their order."""

_COMPARES = {
    "And", "CumSum", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "ReduceSum", "Xor",
}  # fmt: skip

_ORDERS = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
_MASKS = {(CONTRIB_DOMAIN, "MultiHeadAttention", 4), (CONTRIB_DOMAIN, "Attention", 3)}
"""Operands that are a mask where they are no lengths."""

_SIZE_OPERANDS = {
    "ConstantOfShape": {0}, "Expand": {1}, "OneHot": {1}, "Pad": {1}, "Range": {0, 1, 2}, "Reshape": {1},
    "Slice": {1, 2, 3, 4}, "Split": {1}, "Tile": {1}, "TopK": {1},
}  # fmt: skip

_COUNTS = {"Add", "Cast", "Gather", "Identity", "ReduceSum", "Reshape", "Squeeze", "Sub", "Unsqueeze"}
"""From a mask to the number of its tokens."""

_NEAR = 32
"""Values looked at below a product of masks."""
_HIDES_FROM = -1000.0
"""A number up to this one, added to a score, hides it."""

_INTEGERS = {ir.DataType.INT64, ir.DataType.INT32}


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """What one graph input is for.

    ``limit`` is, for an index, the first number that is too large; None where no table with a known size was found.
    ``spans`` are, for a length, what each of its readers asks for.
    """

    kind: Kind
    limit: int | None = None
    spans: tuple[Span, ...] = ()


@dataclasses.dataclass(slots=True)
class _Evidence:
    limits: list[int | None] = dataclasses.field(default_factory=list)
    compared: bool = False
    spans: list[Span] = dataclasses.field(default_factory=list)
    one_minus: bool = False
    size: bool = False
    cast: bool = False


def read_roles(model: ir.Model) -> dict[str, Role]:
    """The role of every graph input that has to be fed, by name.

    Follows the input through operators that keep its numbers, into subgraphs and local functions. A name
    counts only where the graph gives no answer.
    """
    shapes = functools.cache(lambda: Shapes(model.graph))
    return {name: _role(model, value, shapes) for name, value in fed_inputs(model).items()}


def fed_inputs(model: ir.Model) -> dict[str, ir.Value]:
    """The graph inputs without a default value, by name."""
    return {v.name or "": v for v in model.graph.inputs if v.name not in model.graph.initializers}


def holds_boxes(name: str, shape: Sequence[int]) -> bool:
    """Whether an input is the places of words on a page, ``x0, y0, x1, y1`` along its last axis.

    Models look up ``x1 - x0`` in a table as well, so that both corners have to be in order; no operator says which.
    """
    return "bbox" in name.lower() and len(shape) > 0 and shape[-1] == 4


def _role(model: ir.Model, value: ir.Value, shapes: Callable[[], Shapes]) -> Role:
    evidence = _follow(model, value, shapes)
    name = (value.name or "").lower()
    if value.dtype == ir.DataType.BOOL:
        return Role("mask")
    if value.dtype in _INTEGERS:
        known = [limit for limit in evidence.limits if limit is not None]
        if known or (evidence.limits and not evidence.spans):
            return Role("index", min(known) if known else None)
        if evidence.spans:
            return Role("length", spans=tuple(dict.fromkeys(evidence.spans)))
        if _counts_cached_keys(value):
            # A padded prompt leaves rows of GroupQueryAttention unspecified: only ones compare.
            return Role("size")
        if evidence.compared or evidence.one_minus or evidence.cast or "mask" in name:
            return Role("mask")
        return Role("size") if evidence.size else Role("index")
    # A float that is compared or summed is as a rule no mask: only `1 - x` says so.
    return Role("mask" if evidence.one_minus else "number")


def _counts_cached_keys(value: ir.Value) -> bool:
    """Whether a mask is summed up to ``seqlens_k`` of a GroupQueryAttention node."""
    todo, seen = [value], {value}
    while todo:
        for node, operand in todo.pop().uses():
            if node.op_type == "GroupQueryAttention" and operand == 5:
                return True
            new = [v for v in node.outputs if v not in seen] if node.op_type in _COUNTS and operand == 0 else []
            seen.update(new)
            todo.extend(new)
    return False


def _follow(model: ir.Model, start: ir.Value, shapes: Callable[[], Shapes]) -> _Evidence:
    evidence = _Evidence()
    actual: dict[ir.Value, ir.Value | None] = {}  # formal input of a local function -> what the call hands over
    todo = [(start, 0)]
    seen = {start}
    while todo:
        value, offset = todo.pop()
        for node, operand in value.uses():
            for reached, new_offset in _step(model, node, operand, offset, evidence, actual, shapes):
                if reached not in seen:
                    seen.add(reached)
                    todo.append((reached, new_offset))
    return evidence


def _step(
    model: ir.Model,
    node: ir.Node,
    operand: int,
    offset: int,
    evidence: _Evidence,
    actual: dict[ir.Value, ir.Value | None],
    shapes: Callable[[], Shapes],
) -> Iterator[tuple[ir.Value, int]]:
    """Notes what ``node`` says about its operand and yields the values that still hold its numbers."""
    span = span_of(node, operand, shapes)
    if span is not None:
        evidence.spans.append(span.moved(-offset))
        return
    function = model.functions.get(node.op_identifier())
    if function is not None:
        for formal, handed in zip(function.inputs, node.inputs, strict=False):
            actual[formal] = handed
        yield function.inputs[operand], offset
        return
    if node.domain not in _KNOWN:
        return  # of the same name, maybe, and anything else than that operator
    op = node.op_type
    table = _INDEXED_BY.get((node.domain, op), {}).get(operand)
    if table is not None:
        size = _table_size(node, table, actual)
        evidence.limits.append(None if size is None else max(1, size - offset))
        return
    if op == "OneHot" and operand == 0:
        depth = _constant(g.input_of(node, 1))
        evidence.limits.append(None if depth is None else int(depth))
        return
    if operand in _SIZE_OPERANDS.get(op, ()):
        evidence.size = True
    elif op in _ORDERS and (positions := g.input_of(node, 1 - operand)) is not None and _are_positions(positions):
        evidence.spans.append(span_of_compared(positions, shapes).moved(-offset))
    elif op in _COMPARES or (op == "Where" and operand == 0) or (node.domain, op, operand) in _MASKS:
        evidence.compared = True
    elif _is_one_minus(node, operand) or (op == "Mul" and _hides(node.outputs[0])):
        evidence.one_minus = True
    elif op in ("Add", "Sub"):
        shift = _constant(g.input_of(node, 1 - operand))
        if shift is not None:
            yield node.outputs[0], offset + int(shift if op == "Add" else -shift)
    elif op in _KEEPS_VALUES:
        evidence.cast |= op == "Cast"
        for output in node.outputs:
            yield output, offset


def _are_positions(value: ir.Value) -> bool:
    """Whether a value is made of 0, 1, 2, ..., as the positions are that a length is compared with."""
    reached: ir.Value | None = value
    for _ in range(8):
        node = None if reached is None else reached.producer()
        if node is None or node.op_type == "Constant":
            return _counts_up(reached)
        if node.op_type not in _KEEPS_VALUES:
            return node.op_type == "Range"
        reached = g.input_of(node, 0)
    return False


def _counts_up(value: ir.Value | None) -> bool:
    """Whether a value is a constant of 0, 1, 2, ... along its one long axis."""
    array = g.constant(value)
    if array is None or array.size < 2 or array.dtype.kind not in "iuf":
        return False
    return max(array.shape) == array.size and bool((array.reshape(-1) == np.arange(array.size)).all())


def _is_one_minus(node: ir.Node, operand: int) -> bool:
    """``1 - mask``, the first half of ``(1 - mask) * -10000``."""
    return node.op_type == "Sub" and operand == 1 and _constant(node.inputs[0]) == 1.0


def _hides(product: ir.Value) -> bool:
    """Whether masks are joined by a product, of which ``(1 - product) * -10000`` is taken next.

    One minus a product alone says little: numbers are subtracted so as well.
    """
    todo, seen = [(product, False)], {product}
    while todo and len(seen) <= _NEAR:
        value, subtracted = todo.pop()
        for node, operand in value.uses():
            if node.domain or operand >= 2:
                continue
            if subtracted and node.op_type == "Mul":
                factor = _constant(g.input_of(node, 1 - operand))
                if factor is not None and factor <= _HIDES_FROM:
                    return True
                continue
            minus = not subtracted and _is_one_minus(node, operand)
            joined = not subtracted and node.op_type == "Mul"
            if (minus or joined or node.op_type in _KEEPS_VALUES) and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                todo.append((node.outputs[0], subtracted or minus))
    return False


def _constant(value: ir.Value | None) -> float | None:
    """The number that ``value`` holds when it is a constant of one element."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or tensor.dtype == ir.DataType.STRING:
        return None
    number = float(tensor.numpy().reshape(()))
    return number if abs(number) < 2**62 else None


def _table_size(node: ir.Node, table: int, actual: dict[ir.Value, ir.Value | None]) -> int | None:
    value = node.inputs[table]
    while value is not None and value.shape is None:
        producer = value.producer()
        if producer is not None and producer.op_type in ("Cast", "Identity", "DequantizeLinear"):
            value = g.input_of(producer, 0)
        else:
            value = actual.get(value)
    shape = None if value is None else value.shape
    if shape is None or not len(shape):
        return None
    if node.op_type.endswith("ND"):
        sizes = [d for d in shape if isinstance(d, int)]
        return min(sizes) if sizes else None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    size = shape[axis]
    return size if isinstance(size, int) else None
