# SPDX-License-Identifier: Apache-2.0
"""Scores multiplied by 1 where a key is visible and by 0 where it is not, and a large number added there: a mask.

``scores * b - 1e10 * (1 - b)`` is how the first GPT and GPT-2 mask. It gives the scores, or the fill alone, as
``Where(b, scores, fill)`` does.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Hidden, Refused, Side
from flash_export.layout import is_float_cast
from flash_export.mask_terms import uniform
from flash_export.patterns.same_value import same_value
from flash_export.region import Region

_ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
_MOVING = ("Identity", "Slice", "Gather", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Trilu")
_FARTHEST = 64
"""Nodes looked at above a factor, or between it and what is added."""


def hidden_by(erased: Side, added: ir.Value, sign: float, node: ir.Node, region: Region) -> Hidden:
    """The mask that the factor ``erased`` and ``sign`` times ``added``, added to the scores right after, make together.

    Raises:
        Refused: ``scale_not_scalar``: the factor is not known to be 0 and 1, or what is added is not 0 where it is 1.
    """
    factor = erased.value
    if _is_zero_or_one(factor, region):
        at_zero, at_one = (_at(added, factor, number, region, _FARTHEST) for number in (0.0, 1.0))
        if at_one == 0.0 and at_zero is not None:
            condition = region.drafts.op("Cast", factor, to=int(ir.DataType.BOOL))
            return Hidden(condition, True, sign * at_zero, erased.axes, node)
    raise differs_by_key(erased.node)


def refuse_erased(erased: Side | None) -> None:
    """Refuses a factor beside which nothing is added.

    Raises:
        Refused: ``scale_not_scalar``.
    """
    if erased is not None:
        raise differs_by_key(erased.node)


def differs_by_key(node: ir.Node) -> Refused:
    """Why scores stay that ``node`` multiplies by a tensor which differs from key to key."""
    return Refused(
        "scale_not_scalar",
        "the scores are multiplied by a tensor that differs from key to key; one number, a factor for each row, or 0 "
        "and 1 with a large number added where it is 0, are read",
        node,
        "if it only hides keys, mask with torch.where or masked_fill and minus infinity instead; if it scales them,"
        " multiply K by it before the product; else leave this attention in standard operators",
    )


def _is_zero_or_one(value: ir.Value, region: Region) -> bool:
    """Whether each number of ``value`` is 0 or 1 at all lengths: a truth as a number, or taken from a constant."""
    for _ in range(_FARTHEST):
        numbers = g.constant(value)
        if numbers is not None:
            return bool(np.isin(numbers, (0, 1)).all())
        node = value.producer()
        if g.is_op(node, "Cast") and node is not None and region.shapes.dtype(node.inputs[0]) == ir.DataType.BOOL:
            return True
        if g.is_op(node, "ConstantOfShape"):
            return uniform(value, region.evaluator) in (0.0, 1.0)
        moves = node is not None and (g.is_op(node, *_MOVING) or is_float_cast(node, region.shapes))
        if not moves or node is None or node.inputs[0] is None:
            return False
        value = node.inputs[0]
    return False


def _at(value: ir.Value, factor: ir.Value, number: float, region: Region, left: int) -> float | None:
    """What ``value``, computed number by number from ``factor``, is where that is ``number``; None for other values."""
    if same_value(value, factor):
        return number
    constant = uniform(value, region.evaluator)
    node = value.producer()
    if constant is not None or node is None or not left:
        return constant
    kept = g.is_op(node, "Identity", "Neg") or (node.op_type == "Cast" and is_float_cast(node, region.shapes))
    if not kept and not g.is_op(node, *_ARITHMETIC):
        return None
    parts = [None if v is None else _at(v, factor, number, region, left // 2) for v in node.inputs]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts):
        return None
    if len(known) == 1:
        return -known[0] if node.op_type == "Neg" else known[0]
    with np.errstate(all="ignore"):
        return float(_ARITHMETIC[node.op_type](np.float64(known[0]), np.float64(known[1])))
