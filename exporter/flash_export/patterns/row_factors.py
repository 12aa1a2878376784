# SPDX-License-Identifier: Apache-2.0
"""Scores multiplied by one number for all keys of a row, such as a scale of each head: the same as a factor of Q."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from flash_export import einsum
from flash_export.canonical import Refused, Side
from flash_export.contrib_product import keeps_rows
from flash_export.dims import ONE, Dim
from flash_export.dtype_refusal import unlike_factor
from flash_export.enlarging import why_enlarged
from flash_export.layout import Axes, Chain, leaves, size_of
from flash_export.odd_numbers import refuse_odd_factor
from flash_export.patterns.erased import differs_by_key
from flash_export.region import Product, Region

if TYPE_CHECKING:
    from flash_export.patterns.scores import Expression


def row_factor(node: ir.Node, by: ir.Value, region: Region) -> Callable[[Expression], None]:
    """A factor that is one number for all keys may as well multiply Q, as long as nothing has been added yet.

    One that differs from key to key may be half of a mask (``erased``).
    """

    def effect(e: Expression) -> None:
        shape = region.shapes.shape(by)
        sizes = [region.shapes.normal(size_of(axis)) for axis in e.axes]
        more = "" if shape is None else why_enlarged(shape, sizes)
        how = "divided" if node.op_type == "Div" else "multiplied"
        if more:
            what = f"{how} by a tensor that makes more of them: {more}"
        elif node.op_type == "Div":
            what = "divided by a tensor"
        elif e.erased is not None:
            raise differs_by_key(node)
        elif e.terms or e.softcap or e.inside_tanh or e.sinks is not None:
            what = "multiplied by a tensor after a mask, a bias, a soft cap or a sink"
        elif shape is None or shape[-1:] not in ((), (ONE,)):
            e.erased = Side(by, e.axes, node)
            return
        else:
            e.row_factors.append(Side(by, e.axes, node))
            return
        raise Refused(
            "scale_not_scalar",
            f"the scores are {what}; one number, or a factor for each row, is read as the scale",
            node,
            "multiply Q by the tensor before the product, or leave this attention in standard operators",
        )

    return effect


def with_row_factors(
    expression: Expression, scores: Product, first: ir.Node, query: Chain, at: int, region: Region
) -> Chain:
    """Q times the factors of its rows, written down as a draft; Q itself where there are none.

    Args:
        first: the product of Q and K.
        at: which of its operands Q is.

    Raises:
        Refused: ``scale_not_scalar`` for a factor that does not stand beside Q's own axes; ``dtype`` for one of another
            type than Q's; ``not_finite``, ``scale_zero`` or ``attribute_range`` for its numbers.
    """
    for side in expression.row_factors:
        if side.axes != scores.axes:
            raise _elsewhere(side)
        refuse_odd_factor(side)
        if region.shapes.dtype(query.values[-1]) != region.shapes.dtype(side.value):
            raise unlike_factor(query.values[-1], side, region.shapes)
        factor, axes = _beside_query(side, scores, first, query, at, region)
        value = region.drafts.op("Mul", query.values[-1], factor)
        query = Chain([value], [], [_spread(query.last, axes, region.shapes.shape(factor))], [], [])
    return query


def _beside_query(
    side: Side, scores: Product, first: ir.Node, query: Chain, at: int, region: Region
) -> tuple[ir.Value, Axes]:
    """The factor with its axes where Q has them, and what each of Q's axes is in the scores.

    Raises:
        Refused: ``scale_not_scalar`` where Q lacks an axis of the factor.
    """
    if first.op_type != "Einsum":
        if at or not keeps_rows(first) or len(query.last) != len(scores.axes):
            raise _elsewhere(side)
        return side.value, scores.axes
    ranks = [len(region.shapes.shape(value) or ()) for value in first.inputs]
    ranks[at] = len(query.last)
    names = einsum.letters(first, ranks)
    shape = region.shapes.shape(side.value)
    if names is None or shape is None or len(names[1]) != len(scores.axes):
        raise _elsewhere(side)
    own, out = names[0][at], names[1]
    lengths = [*([ONE] * (len(out) - len(shape))), *shape]
    if any(length != ONE for name, length in zip(out, lengths, strict=True) if name not in own):
        raise _elsewhere(side)
    value = side.value
    if len(shape) < len(out):
        value = region.drafts.unsqueeze(value, *range(len(out) - len(shape)))
    if others := [at for at, name in enumerate(out) if name not in own]:
        value = region.drafts.squeeze(value, *others)
    kept = [name for name in out if name in own]
    wanted = [name for name in own if name in out]
    if kept != wanted:
        value = region.drafts.op("Transpose", value, perm=[kept.index(name) for name in wanted])
    if summed := [at for at, name in enumerate(own) if name not in out]:
        value = region.drafts.unsqueeze(value, *summed)
    return value, [scores.axes[out.index(name)] if name in out else [] for name in own]


def _elsewhere(side: Side) -> Refused:
    return Refused(
        "scale_not_scalar",
        "the scores are multiplied by a tensor whose axes are not those of Q",
        side.node,
        "multiply Q by the tensor before the product, or leave this attention in standard operators",
    )


def _spread(query: Axes, scores: Axes, factor: Sequence[Dim] | None) -> Axes:
    """Q's axes times the factor: the scores' own where Q has length 1 and the factor has not, as K's heads may be."""
    lengths = [*([ONE] * (len(query) - len(factor or ()))), *(factor or ())]
    return [
        own if leaves(own) or length == ONE else axis for own, axis, length in zip(query, scores, lengths, strict=True)
    ]
