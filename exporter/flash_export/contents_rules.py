# SPDX-License-Identifier: Apache-2.0
"""What a small integer tensor holds, as dims: the arithmetic with which exporters compute Reshape targets and pads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.dims import ONE, Dim

if TYPE_CHECKING:
    from flash_export.shapes import Shapes

MAX_CONTENTS = 64
"""Integer tensors of more elements are data, not a shape."""


def contents_of(s: Shapes, node: ir.Node) -> list[tuple[Dim, ...] | None]:
    """What each output holds, as far as it is known; a node that ONNX Runtime would refuse has no contents.

    Nor has one of a number that its type does not hold: runtimes wrap it.
    """
    try:
        if node.op_type == "Split":
            found = _split_contents(s, node)
        else:
            rule = _CONTENTS_RULES.get(node.op_type)
            found = [] if rule is None else [rule(s, node)]
    except (IndexError, ValueError):  # NumPy's, of an axis, a step of 0 or shapes that do not meet
        return []
    narrow = [s.dtype(v) == ir.DataType.INT32 for v in node.outputs]
    return [c if c is None or _fits(c, 31 if is32 else 63) else None for c, is32 in zip(found, narrow, strict=False)]


def _fits(contents: tuple[Dim, ...], bits: int) -> bool:
    return all(d.static is None or -(2**bits) <= d.static < 2**bits for d in contents)


def shape_contents(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    shape = s.shape(node.inputs[0])
    if shape is None:
        return None
    start, end = g.int_attribute(node, "start", 0), node.attributes.get("end")
    return shape[start : None if end is None else end.as_int()]


def _contents_same(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    return s.contents(node.inputs[0])


def _contents_cast(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    to, contents = ir.DataType(g.int_attribute(node, "to", 7)), s.contents(node.inputs[0])
    if to in (ir.DataType.INT32, ir.DataType.INT64) or contents is None:
        return contents
    if to != ir.DataType.BOOL or any(d.static is None for d in contents):
        return None
    return tuple(Dim.of(int(d != Dim.of(0))) for d in contents)


def _array(s: Shapes, value: ir.Value | None) -> np.ndarray | None:
    """The contents in the shape of their tensor; those of a tensor of unknown shape are a vector."""
    contents = s.contents(value)
    shape = s.shape(value)
    if contents is None:
        return None
    array = np.empty(len(contents), object)
    array[:] = contents
    if shape is None:
        return array
    sizes = [dim.static for dim in shape]
    if None in sizes or math.prod(size or 0 for size in sizes) != len(contents):
        return None
    return array.reshape([size or 0 for size in sizes])


def _flat(array: np.ndarray) -> tuple[Dim, ...]:
    return tuple(array.reshape(-1))


def _contents_gather(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    data, indices = _array(s, node.inputs[0]), _array(s, node.inputs[1])
    if data is None or indices is None or not data.ndim:
        return None
    axis = g.int_attribute(node, "axis", 0) % data.ndim
    at = [i.static for i in indices.reshape(-1)]
    if any(i is None or not -data.shape[axis] <= i < data.shape[axis] for i in at):
        return None
    return _flat(np.take(data, np.array(at, np.int64), axis))


def _contents_slice(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    data = _array(s, node.inputs[0])
    bounds = [s.contents(v) for v in node.inputs[1:]]
    if data is None or not data.ndim or len(bounds) < 2 or any(b is None or len(b) != 1 for b in bounds):
        return None
    numbers = [b[0].static for b in bounds if b is not None]
    if None in numbers:
        return None
    start, end, axis, step = ([n for n in numbers if n is not None] + [0, 1][len(numbers) - 2 :])[:4]
    places = places_of_slice(data.shape[axis], start, end, step)
    return None if places is None else _flat(np.take(data, np.array(places, np.int64), axis))


def places_of_slice(length: int, start: int, end: int, step: int) -> range | None:
    """The places that a Slice takes of an axis; None where runtimes differ, as of one backward to past the end.

    Source: the ONNX operator's own text on how start and end are clamped, which is not NumPy's for a negative step.
    """
    if not step or (step < 0 and end >= 2**31 - 1):
        return None
    start, end = (place + length if place < 0 else place for place in (start, end))
    least, most = (0, length) if step > 0 else (-1, length - 1)
    return range(min(max(start, 0), most), min(max(end, least), most), step)


def _contents_transpose(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    data = _array(s, node.inputs[0])
    return None if data is None else _flat(np.transpose(data, g.ints_attribute(node, "perm")))


def _split_contents(s: Shapes, node: ir.Node) -> list[tuple[Dim, ...] | None]:
    """The parts of a vector: ONNX Runtime's optimizer takes lengths out of a Shape by Split."""
    data, shapes = _array(s, node.inputs[0]), [s.shape(v) for v in node.outputs]
    parts: list[tuple[Dim, ...] | None] = []
    start = 0
    for shape in shapes:
        count = None if shape is None or len(shape) != 1 else shape[0].static
        if data is None or data.ndim != 1 or count is None:
            return [None] * len(shapes)
        parts.append(_flat(data[start : start + count]))
        start += count
    return parts


def _contents_concat(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    parts = [_array(s, v) for v in node.inputs]
    known = [p for p in parts if p is not None]
    if len(known) != len(parts) or not known[0].ndim or len({p.ndim for p in known}) != 1:
        return None
    return _flat(np.concatenate(known, g.int_attribute(node, "axis", 0)))


def _contents_negative(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    contents = s.contents(node.inputs[0])
    return None if contents is None else tuple(Dim.of(0) - d for d in contents)


def _contents_binary(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    if len(node.inputs) != 2:  # Max takes any number
        return None
    a, b = _array(s, node.inputs[0]), _array(s, node.inputs[1])
    if a is None or b is None:
        return None
    if node.op_type == "Mod" and g.int_attribute(node, "fmod", 0):
        return None
    results = [_arithmetic(s, node.op_type, x, y) for x, y in np.broadcast(a, b)]
    known = [r for r in results if r is not None]
    return tuple(known) if len(known) == len(results) else None


def _arithmetic(s: Shapes, op: str, x: Dim, y: Dim) -> Dim | None:
    if op in ("Add", "Sub"):
        return s.length(x + y if op == "Add" else x - y)
    if op == "Mul":
        return x * y
    if op == "Max":
        return _larger(x, y)
    if op == "Equal":
        if x.static is None and y.static is None:
            return ONE if x == y else None
        if x.static is None or y.static is None:
            dim, number = (x, y.static) if x.static is None else (y, x.static)
            # A length is never negative, so a symbol differs from -1.
            return Dim.of(0) if number is not None and number < 0 and all(c > 0 for c in dim.terms.values()) else None
        return Dim.of(int(x == y))
    a, b = x.static, y.static
    if a is not None and b:
        if op == "Div":  # ONNX truncates towards zero
            return Dim.of(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))
        return Dim.of(a % b) if b > 0 else None
    if op == "Mod" and b is not None and b > 0:
        return s.length(x - s.quotient(x, b) * y)  # of the divisor's sign, whatever that of a length
    if op != "Div" or b == 0:
        return None
    exact = x.divided(y)
    # Rounded down and towards zero are one for lengths, and for what is left of a length behind a kernel.
    grows = all(c > 0 for m, c in x.terms.items() if m)
    return s.quotient(x, b) if exact is None and b is not None and b > 0 and grows else exact


def _larger(x: Dim, y: Dim) -> Dim | None:
    """The larger of two numbers. A name is taken for a length of 1 or more, as wherever lengths are broadcast."""
    if x.static is not None and y.static is not None:
        return Dim.of(max(x.static, y.static))
    dim, number = (x, y.static) if x.static is None else (y, x.static)
    return dim if number is not None and number <= 1 and all(c > 0 for c in dim.terms.values()) else None


def _contents_where(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    parts = [_array(s, v) for v in node.inputs]
    known = [p for p in parts if p is not None]
    if len(known) != len(parts):
        return None
    rows = list(np.broadcast(*known))
    if any(condition.static is None for condition, _, _ in rows):
        return None
    return tuple(x if condition.static else y for condition, x, y in rows)


def _contents_constant_of_shape(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    target = s.contents(node.inputs[0])
    if target is None or len(target) != 1 or target[0].static is None or target[0].static > MAX_CONTENTS:
        return None
    attribute = node.attributes.get("value")
    array = np.zeros(1) if attribute is None else g.tensor_of(attribute).numpy()
    if array.dtype.kind not in "iub" or array.size != 1:
        return None
    return (Dim.of(int(array.reshape(-1)[0])),) * target[0].static


_CONTENTS_RULES: dict[str, Callable[[Shapes, ir.Node], tuple[Dim, ...] | None]] = {
    "Shape": shape_contents,
    **dict.fromkeys(("Identity", "Unsqueeze", "Squeeze", "Reshape"), _contents_same),
    "Cast": _contents_cast,
    "Neg": _contents_negative,
    "Transpose": _contents_transpose,
    "Gather": _contents_gather,
    "Slice": _contents_slice,
    "Concat": _contents_concat,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Mod", "Max", "Equal"), _contents_binary),
    "Where": _contents_where,
    "ConstantOfShape": _contents_constant_of_shape,
}
