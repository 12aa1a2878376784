# SPDX-License-Identifier: Apache-2.0
"""What each input of a graph is for, read from where it flows: an index into a table, a mask, a size, or a number.

Random numbers only make a fair test when they respect the role: a token id past the end of its table is an error,
and a mask of random integers masks nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import onnx_ir as ir

Kind = Literal["index", "mask", "size", "number"]

_INDEXED_BY = {
    ("", "Gather"): {1: 0},
    ("", "GatherElements"): {1: 0},
    ("", "GatherND"): {1: 0},
    ("", "ScatterElements"): {1: 0},
    ("", "ScatterND"): {1: 0},
    ("com.microsoft", "EmbedLayerNormalization"): {0: 2, 1: 4},
}
"""Operator -> {operand that holds indices: operand that holds the table}."""

_KEEPS_VALUES = {
    "Cast", "Clip", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Max", "Min",
    "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
"""The output holds numbers of the input, whatever their order."""

_COMPARES = {
    "And", "CumSum", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "ReduceSum", "Xor",
}  # fmt: skip

_ORDERS = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
_LONGEST = 64
"""Lengths are drawn below this: some end inside the sequences that the check draws, some behind short ones."""

_SIZE_OPERANDS = {
    "ConstantOfShape": {0}, "Expand": {1}, "OneHot": {1}, "Pad": {1}, "Range": {0, 1, 2}, "Reshape": {1},
    "Slice": {1, 2, 3, 4}, "Split": {1}, "Tile": {1}, "TopK": {1},
}  # fmt: skip

_COUNTS = {"Add", "Cast", "Gather", "Identity", "ReduceSum", "Reshape", "Squeeze", "Sub", "Unsqueeze"}
"""From a mask to the number of its tokens."""

_INTEGERS = {ir.DataType.INT64, ir.DataType.INT32}


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """What one graph input is for.

    ``limit`` is, for an index, the first number that is too large; None where no table with a known size was found.
    """

    kind: Kind
    limit: int | None = None


@dataclasses.dataclass(slots=True)
class _Evidence:
    limits: list[int | None] = dataclasses.field(default_factory=list)
    compared: bool = False
    length: bool = False
    one_minus: bool = False
    size: bool = False
    cast: bool = False


def read_roles(model: ir.Model) -> dict[str, Role]:
    """The role of every graph input that has to be fed, by name.

    Follows the input through operators that keep its numbers, into subgraphs and local functions. A name
    counts only where the graph gives no answer.
    """
    return {name: _role(model, value) for name, value in fed_inputs(model).items()}


def fed_inputs(model: ir.Model) -> dict[str, ir.Value]:
    """The graph inputs without a default value, by name."""
    return {v.name or "": v for v in model.graph.inputs if v.name not in model.graph.initializers}


def _role(model: ir.Model, value: ir.Value) -> Role:
    evidence = _follow(model, value)
    name = (value.name or "").lower()
    if value.dtype == ir.DataType.BOOL:
        return Role("mask")
    if value.dtype in _INTEGERS:
        if evidence.limits:
            known = [limit for limit in evidence.limits if limit is not None]
            return Role("index", min(known) if known else None)
        if _counts_cached_keys(value):
            # A padded prompt leaves rows of GroupQueryAttention unspecified: only ones compare.
            return Role("size")
        if evidence.length:
            return Role("index", _LONGEST)
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


def _follow(model: ir.Model, start: ir.Value) -> _Evidence:
    evidence = _Evidence()
    actual: dict[ir.Value, ir.Value | None] = {}  # formal input of a local function -> what the call hands over
    todo = [(start, 0)]
    seen = {start}
    while todo:
        value, offset = todo.pop()
        for node, operand in value.uses():
            for reached, new_offset in _step(model, node, operand, offset, evidence, actual):
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
) -> Iterator[tuple[ir.Value, int]]:
    """Notes what ``node`` says about its operand and yields the values that still hold its numbers."""
    function = model.functions.get(node.op_identifier())
    if function is not None:
        for formal, handed in zip(function.inputs, node.inputs, strict=False):
            actual[formal] = handed
        yield function.inputs[operand], offset
        return
    op = node.op_type
    table = _INDEXED_BY.get((node.domain, op), {}).get(operand)
    if table is not None:
        size = _table_size(node, table, actual)
        evidence.limits.append(None if size is None else max(1, size - offset))
        return
    if op == "OneHot" and operand == 0:
        depth = _constant(node.inputs[1])
        evidence.limits.append(None if depth is None else int(depth))
        return
    if operand in _SIZE_OPERANDS.get(op, ()):
        evidence.size = True
    elif op in _ORDERS and _are_positions(node.inputs[1 - operand]):
        evidence.length = True
    elif op in _COMPARES or (op == "Where" and operand == 0):
        evidence.compared = True
    elif _is_one_minus(node, operand):
        evidence.one_minus = True
    elif op in ("Add", "Sub"):
        shift = _constant(node.inputs[1 - operand])
        if shift is not None:
            yield node.outputs[0], offset + int(shift if op == "Add" else -shift)
    elif op in _KEEPS_VALUES:
        evidence.cast |= op == "Cast"
        for output in node.outputs:
            yield output, offset


def _are_positions(value: ir.Value | None) -> bool:
    """Whether a value is made of a Range, as the positions are that a length is compared with."""
    for _ in range(8):
        node = None if value is None else value.producer()
        if node is None or node.op_type not in _KEEPS_VALUES:
            return node is not None and node.op_type == "Range"
        value = node.inputs[0]
    return False


def _is_one_minus(node: ir.Node, operand: int) -> bool:
    """``1 - mask``, the first half of ``(1 - mask) * -10000``."""
    return node.op_type == "Sub" and operand == 1 and _constant(node.inputs[0]) == 1.0


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
            value = producer.inputs[0]
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
