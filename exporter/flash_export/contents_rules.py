# SPDX-License-Identifier: Apache-2.0
"""What a small integer tensor holds, as dims: the arithmetic with which exporters compute Reshape targets."""

from __future__ import annotations

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


def shape_contents(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    shape = s.shape(node.inputs[0])
    if shape is None:
        return None
    start, end = g.int_attribute(node, "start", 0), node.attributes.get("end")
    return shape[start : None if end is None else end.as_int()]


def _contents_same(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    if node.op_type == "Cast" and g.int_attribute(node, "to", 7) not in (6, 7, 9):
        return None
    return s.contents(node.inputs[0])


def _contents_gather(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    data, indices = s.contents(node.inputs[0]), s.contents(node.inputs[1])
    if data is None or indices is None:
        return None
    at = [i.static for i in indices]
    if any(i is None or not -len(data) <= i < len(data) for i in at):
        return None
    return tuple(data[i] for i in at if i is not None)


def _contents_slice(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    data = s.contents(node.inputs[0])
    bounds = [s.contents(v) for v in node.inputs[1:]]
    if data is None or len(bounds) < 2 or any(b is None or len(b) != 1 or b[0].static is None for b in bounds):
        return None
    start, end = bounds[0][0].static, bounds[1][0].static  # type: ignore
    step = bounds[3][0].static if len(bounds) > 3 else 1  # type: ignore
    return data[start:end:step]


def split_contents(s: Shapes, node: ir.Node) -> list[tuple[Dim, ...] | None]:
    """The parts of a vector: ONNX Runtime's optimizer takes lengths out of a Shape by Split."""
    data, shapes = s.contents(node.inputs[0]), [s.shape(v) for v in node.outputs]
    parts: list[tuple[Dim, ...] | None] = []
    start = 0
    for shape in shapes:
        count = None if shape is None or len(shape) != 1 else shape[0].static
        if data is None or count is None:
            return [None] * len(shapes)
        parts.append(data[start : start + count])
        start += count
    return parts


def _contents_concat(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    parts = [s.contents(v) for v in node.inputs]
    known = [p for p in parts if p is not None]
    return None if len(known) != len(parts) else tuple(d for p in known for d in p)


def _contents_binary(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    a, b = s.contents(node.inputs[0]), s.contents(node.inputs[1])
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    pairs = [(a[i % len(a)], b[i % len(b)]) for i in range(max(len(a), len(b)))]
    results = [_arithmetic(s, node.op_type, x, y) for x, y in pairs]
    known = [r for r in results if r is not None]
    return tuple(known) if len(known) == len(results) else None


def _arithmetic(s: Shapes, op: str, x: Dim, y: Dim) -> Dim | None:
    if op in ("Add", "Sub"):
        return s.length(x + y if op == "Add" else x - y)
    if op == "Mul":
        return x * y
    if op == "Equal":
        # A length is never negative, so a symbol differs from -1.
        if x.static is None and y.static is None:
            return ONE if x == y else None
        if x.static is None or y.static is None:
            number = y.static if x.static is None else x.static
            return Dim.of(0) if number is not None and number < 0 else None
        return Dim.of(int(x == y))
    a, b = x.static, y.static
    if a is not None and b:
        # ONNX integer division truncates towards zero.
        return Dim.of(int(a / b)) if op == "Div" else Dim.of(a % b) if b > 0 else None
    if op != "Div" or b == 0:
        return None
    exact = x.divided(y)
    # Rounded down and towards zero are one for lengths, and for what is left of a length behind a kernel.
    grows = all(c > 0 for m, c in x.terms.items() if m)
    return s.quotient(x, b) if exact is None and b is not None and b > 0 and grows else exact


def _contents_where(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    parts = [s.contents(v) for v in node.inputs]
    if any(p is None or not p for p in parts):
        return None
    condition, x, y = (p for p in parts if p is not None)
    length = max(len(condition), len(x), len(y))
    choice = [condition[i % len(condition)].static for i in range(length)]
    if None in choice:
        return None
    return tuple((x if choice[i] else y)[i % len(x if choice[i] else y)] for i in range(length))


def _contents_constant_of_shape(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    target = s.contents(node.inputs[0])
    if target is None or len(target) != 1 or target[0].static is None or target[0].static > MAX_CONTENTS:
        return None
    attribute = node.attributes.get("value")
    array = np.zeros(1) if attribute is None else g.tensor_of(attribute).numpy()
    if array.dtype.kind not in "iub":
        return None
    return (Dim.of(int(array.reshape(-1)[0])),) * target[0].static


CONTENTS_RULES: dict[str, Callable[[Shapes, ir.Node], tuple[Dim, ...] | None]] = {
    "Shape": shape_contents,
    **dict.fromkeys(("Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape"), _contents_same),
    "Gather": _contents_gather,
    "Slice": _contents_slice,
    "Concat": _contents_concat,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Mod", "Equal"), _contents_binary),
    "Where": _contents_where,
    "ConstantOfShape": _contents_constant_of_shape,
}
