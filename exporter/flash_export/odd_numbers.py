# SPDX-License-Identifier: Apache-2.0
"""Numbers in the graph that leave an attention nothing to compute: NaN or infinity beside scores, a scale of 0."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Attention, Refused, Side
from flash_export.layout import FLOATS
from flash_export.mask_terms import cast_number
from flash_export.op import FLOAT_ATTRIBUTES

_KEEPS = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
"""The output holds the input's numbers and no others, but for what a Cast makes of them."""
_LONGEST = 16
_ROOM = 64
"""What Q is taken to come to where a factor is multiplied into it: it leaves that much of the type's range to Q."""


def refuse_odd_numbers(attention: Attention) -> None:
    """Refuses a sink or a bias that is known to hold NaN or plus infinity.

    Every row that adds one is NaN, in the graph and in the node, but the rest of it need not be the same numbers.

    Raises:
        Refused: ``not_finite``.
    """
    if attention.sinks is not None:
        _refuse("sink", attention.sinks.value, 1.0, attention.sinks.node)
    for term in attention.terms:
        if isinstance(term, Added):
            _refuse("bias", term.value, term.factor, term.node)


def refuse_odd_scale(scale: float, attention: Attention) -> None:
    """Refuses scores that are multiplied by 0, by NaN or by infinity.

    Raises:
        Refused: ``scale_zero``, ``not_finite``.
    """
    if not np.isfinite(scale):
        raise _no_factor(f"the scores are multiplied by {_spelled(scale)}, which makes NaN of them", attention.anchor)
    if scale == 0:
        raise _zero(attention.anchor)


def refuse_odd_factor(side: Side) -> None:
    """Refuses a factor of the scores' rows that is known to hold NaN, an infinity, what is too large, or 0 alone.

    Raises:
        Refused: ``not_finite``, ``attribute_range``, ``scale_zero``.
    """
    array = _numbers(side.value)
    if array is None or array.dtype.kind in "biu" or not array.size:
        return
    what, factors = f'the factor "{side.value.name}" of the scores\' rows', array.astype(np.float64)
    odd = factors[~np.isfinite(factors)]
    if odd.size:
        raise _no_factor(f"{what} holds {_spelled(odd[0])}, which makes NaN of each row that it multiplies", side.node)
    most = min(FLOAT_ATTRIBUTES["scale"][1], float(ml_dtypes.finfo(array.dtype).max) / _ROOM)
    largest = float(np.abs(factors).max())
    if largest > most:
        raise Refused(
            "attribute_range",
            f"{what} comes to {largest:g}, and Q times that may leave what {array.dtype} holds; flash_export takes up"
            f" to {most:g}",
            side.node,
            "leave it in standard operators",
        )
    if largest == 0:
        raise _zero(side.node)


def _no_factor(text: str, node: ir.Node) -> Refused:
    return Refused("not_finite", text, node, "leave NaN and infinity out of what scores are multiplied by")


def _zero(node: ir.Node) -> Refused:
    return Refused(
        "scale_zero",
        "the scores are multiplied by 0, so that no query and no key counts",
        node,
        "give the scores a scale (a cap, an alpha) other than 0, or leave it: a mean of V needs no attention",
    )


def _spelled(number: float) -> str:
    return "NaN" if np.isnan(number) else "+infinity" if number > 0 else "-infinity"


def _refuse(what: str, value: ir.Value, factor: float, node: ir.Node) -> None:
    array = _numbers(value)
    if array is None or array.dtype.kind in "biu":
        return
    added = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        added = added * factor
    odd = added[np.isnan(added) | np.isposinf(added)]
    if odd.size:
        raise Refused(
            "not_finite",
            f'the {what} "{value.name}" holds {_spelled(odd[0])}, which makes NaN of each row that it is added to',
            node,
            "hide a key with minus infinity; leave NaN and plus infinity out of what is added to scores",
        )


def _numbers(value: ir.Value) -> np.ndarray | None:
    """The numbers that ``value`` holds, whatever their order, where they come from constants; of a Where all it may.

    Casts between float types count: 1e5 is infinity behind one to float16.
    """
    casts: list[ir.DataType] = []
    for _ in range(_LONGEST):
        array = _constants(value)
        if array is not None:
            return _cast(array, casts)
        node = value.producer()
        above = node.inputs[0] if node is not None and g.is_op(node, *_KEEPS) else None
        if node is None or above is None:
            return None
        if node.op_type == "Cast":
            casts.append(ir.DataType(g.int_attribute(node, "to", 0)))
        value = above
    return None


def _constants(value: ir.Value) -> np.ndarray | None:
    """The numbers of a constant, or of the constants among which a Where chooses."""
    node = value.producer()
    if node is None or not g.is_op(node, "Where"):
        return g.constant(value)
    sides = [None if v is None else g.constant(v) for v in node.inputs[1:]]
    found = [side.reshape(-1) for side in sides if side is not None]
    return np.concatenate(found) if found else None


def _cast(array: np.ndarray, casts: list[ir.DataType]) -> np.ndarray | None:
    """The numbers behind ``casts``, the lowest first; None where one is of another type than floats."""
    for to in reversed(casts):
        made = cast_number(array, to) if to in FLOATS else None
        if made is None:
            return None
        array = made
    return array
