# SPDX-License-Identifier: Apache-2.0
"""Numbers in the graph that leave an attention nothing to compute: NaN or infinity added to scores, a scale of 0."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Attention, Refused

_KEEPS = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
"""The output holds the input's numbers and no others."""
_LONGEST = 16


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


def refuse_zero(scale: float, attention: Attention) -> None:
    """Refuses scores that are multiplied by 0.

    Raises:
        Refused: ``scale_zero``.
    """
    if scale == 0:
        raise Refused(
            "scale_zero",
            "the scores are multiplied by 0, so that no query and no key counts",
            attention.anchor,
            "give the scores a scale (a cap, an alpha) other than 0, or leave it: a mean of V needs no attention",
        )


def _refuse(what: str, value: ir.Value, factor: float, node: ir.Node) -> None:
    array = _numbers(value)
    if array is None or array.dtype.kind != "f":
        return
    added = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        added = added * factor
    odd = added[np.isnan(added) | np.isposinf(added)]
    if odd.size:
        raise Refused(
            "not_finite",
            f'the {what} "{value.name}" holds {"NaN" if np.isnan(odd[0]) else "+infinity"}, which makes NaN of each row'
            " that it is added to",
            node,
            "hide a key with minus infinity; leave NaN and plus infinity out of what is added to scores",
        )


def _numbers(value: ir.Value) -> np.ndarray | None:
    """The numbers that ``value`` holds, whatever their order, where they come from constants; of a Where all it may."""
    for _ in range(_LONGEST):
        array = g.constant(value)
        if array is not None:
            return array
        node = value.producer()
        if node is not None and g.is_op(node, "Where"):
            sides = [None if v is None else g.constant(v) for v in node.inputs[1:]]
            found = [side.reshape(-1) for side in sides if side is not None]
            return np.concatenate(found) if found else None
        above = node.inputs[0] if node is not None and g.is_op(node, *_KEEPS) else None
        if above is None:
            return None
        value = above
    return None
