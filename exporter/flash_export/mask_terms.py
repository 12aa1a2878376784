# SPDX-License-Identifier: Apache-2.0
"""The parts that a mask is made of: one number everywhere, booleans joined by And, sums of masks."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Hidden
from flash_export.dims import ONE
from flash_export.evaluate import Evaluator
from flash_export.layout import FLOATS, regroup, size_of
from flash_export.shapes import Shapes

FORGETS = float(np.finfo(np.float16).min)
"""A key filled with this or less weighs nothing beside a visible one: exp(-65504 + any sane score) is 0."""


def uniform(value: ir.Value, evaluator: Evaluator) -> float | None:
    """The number that every element of ``value`` holds, whatever its lengths; None when there is no such number.

    Casts on the way count: ``-1e9`` is minus infinity behind a Cast to float16, and 1 behind one to a truth.
    """
    number = _uniform(value, evaluator)
    return None if number is None else float(number[0])


def _uniform(value: ir.Value, evaluator: Evaluator) -> np.ndarray | None:
    """The same as an array of one element in the value's own type."""
    array = g.constant(value)
    if array is not None:
        return _repeated(array)
    node = value.producer()
    if g.is_op(node, "ConstantOfShape"):
        assert node is not None
        attribute = node.attributes.get("value")
        return np.zeros(1, np.float32) if attribute is None else g.tensor_of(attribute).numpy().reshape(-1)[:1]
    if node is not None and g.is_op(node, "Expand", "Reshape", "Identity", "Unsqueeze", "Squeeze", "Transpose", "Cast"):
        source = node.inputs[0]
        number = None if source is None else _uniform(source, evaluator)
        if number is None or node.op_type != "Cast":
            return number
        return cast_number(number, ir.DataType(g.int_attribute(node, "to", 0)))
    if node is None or not evaluator.evaluable(value) or evaluator.symbols(value):
        return None
    return _repeated(evaluator.evaluate(value, {}))


def _repeated(array: np.ndarray) -> np.ndarray | None:
    """The element that the array consists of, as an array."""
    flat = array.reshape(-1)
    return flat[:1] if flat.size and (flat == flat[0]).all() else None


def cast_number(number: np.ndarray, to: ir.DataType) -> np.ndarray | None:
    """What ONNX's Cast makes of a number; None where runtimes differ, as of -1e9 in int8 or in 8 bits of float."""
    if to in FLOATS:
        with np.errstate(over="ignore"):
            return number.astype(to.numpy())
    if to == ir.DataType.BOOL:
        return np.asarray(number != 0)
    if not to.is_integer() or not np.isfinite(number).all():
        return None
    limits = ml_dtypes.iinfo(to.numpy())
    return number.astype(to.numpy()) if limits.min <= int(number[0]) <= limits.max else None


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """A boolean tensor and the value of its elements that means "visible"."""

    value: ir.Value
    keep: bool


def summands(term: Added, shapes: Shapes) -> list[Added]:
    """The two summands of an added sum, with their axes above the layout operators between; none for another tensor."""
    value, axes = term.value, term.axes
    node = value.producer()
    while node is not None and g.is_op(node, "Identity", "Expand", "Reshape", "Unsqueeze", "Squeeze"):
        source = node.inputs[0]
        if source is None:
            return []
        if not g.is_op(node, "Identity", "Expand"):
            shape, above = shapes.shape(value), shapes.shape(source)
            if shape is None or above is None or len(shape) > len(axes):
                return []
            own = list(zip(shape, axes[len(axes) - len(shape) :], strict=True))
            if any(d != ONE and d != shapes.normal(size_of(axis)) for d, axis in own):
                return []
            regrouped = regroup([[] if d == ONE else axis for d, axis in own], above)
            if regrouped is None:
                return []
            axes = regrouped
        value, node = source, source.producer()
    if node is None or not g.is_op(node, "Add"):
        return []
    return [Added(v, term.factor, axes, node) for v in node.inputs if v is not None]


def as_hidden(term: Added, evaluator: Evaluator) -> Hidden | None:
    """``Where(condition, 0, fill)`` added to the scores, as the mask that it is; None for any other tensor."""
    node = term.value.producer()
    while g.is_op(node, "Expand", "Identity"):
        assert node is not None
        assert node.inputs[0] is not None
        node = node.inputs[0].producer()
    if not g.is_op(node, "Where") or term.factor <= 0:
        return None
    assert node is not None
    condition, yes, no = node.inputs[0], node.inputs[1], node.inputs[2]
    if condition is None or yes is None or no is None:
        return None
    a, b = uniform(yes, evaluator), uniform(no, evaluator)
    if a == 0.0 and b is not None and b < 0.0:
        return Hidden(condition, True, b * term.factor, term.axes, node)
    if b == 0.0 and a is not None and a < 0.0:
        return Hidden(condition, False, a * term.factor, term.axes, node)
    return None


def conjuncts(literal: Literal, known: dict[Literal, list[Literal]] | None = None) -> list[Literal]:
    """The parts that must all be visible, each once: And of visible parts, Or of hidden ones, through Not."""
    known = {} if known is None else known
    if literal not in known:
        known[literal] = _conjuncts(literal, known)
    return known[literal]


def _conjuncts(literal: Literal, known: dict[Literal, list[Literal]]) -> list[Literal]:
    node = literal.value.producer()
    if g.is_op(node, "Not"):
        assert node is not None
        assert node.inputs[0] is not None
        return conjuncts(Literal(node.inputs[0], not literal.keep), known)
    if g.is_op(node, "Identity", "Expand") or (g.is_op(node, "Cast") and _is_bool_cast(node)):
        assert node is not None
        assert node.inputs[0] is not None
        inner = conjuncts(Literal(node.inputs[0], literal.keep), known)
        return inner if len(inner) > 1 or inner[0].value is not node.inputs[0] else [literal]
    if g.is_op(node, "And" if literal.keep else "Or"):
        assert node is not None
        parts = [part for v in node.inputs if v is not None for part in conjuncts(Literal(v, literal.keep), known)]
        return list(dict.fromkeys(parts))
    return [literal]


def _is_bool_cast(node: ir.Node | None) -> bool:
    source = None if node is None else node.inputs[0]
    return source is not None and (source.dtype == ir.DataType.BOOL or g.is_op(source.producer(), "Not", "And", "Or"))
