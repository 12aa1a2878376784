# SPDX-License-Identifier: Apache-2.0
"""The parts that a mask is made of: one number everywhere, booleans joined by And, sums of masks."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Hidden
from flash_export.dims import ONE
from flash_export.evaluate import Evaluator
from flash_export.layout import regroup, size_of
from flash_export.shapes import Shapes

FORGETS = float(np.finfo(np.float16).min)
"""A key filled with this or less weighs nothing beside a visible one: exp(-65504 + any sane score) is 0."""


def uniform(value: ir.Value, evaluator: Evaluator) -> float | None:
    """The number that every element of ``value`` holds, whatever its lengths; None when there is no such number."""
    array = g.constant(value)
    if array is not None:
        return float(array.reshape(-1)[0]) if array.size and (array == array.reshape(-1)[0]).all() else None
    node = value.producer()
    if g.is_op(node, "ConstantOfShape"):
        assert node is not None
        attribute = node.attributes.get("value")
        return 0.0 if attribute is None else float(g.tensor_of(attribute).numpy().reshape(-1)[0])
    if node is not None and g.is_op(node, "Expand", "Reshape", "Identity", "Unsqueeze", "Squeeze", "Transpose", "Cast"):
        source = node.inputs[0]
        return None if source is None else uniform(source, evaluator)
    if node is None or not evaluator.evaluable(value) or evaluator.symbols(value):
        return None
    array = evaluator.evaluate(value, {})
    return float(array.reshape(-1)[0]) if array.size and (array == array.reshape(-1)[0]).all() else None


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
