# SPDX-License-Identifier: Apache-2.0
"""What a node reads: operands after moves, and bias, lengths and sinks in the shapes that the operator asks for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.arrange import Move, arrange
from flash_export.canonical import Attention, Refused, Side
from flash_export.dims import ONE, Dim, Shape
from flash_export.layout import Axes, Axis, Chain, follow, leaves, unify
from flash_export.masks import BiasPart
from flash_export.region import Region
from flash_export.whole_batch import over_whole


@dataclasses.dataclass(frozen=True, slots=True)
class Feed:
    """A value that the node reads, after ``moves``.

    ``factor`` is the scale that lies between it and the product, ``path`` the graph's nodes between the two.
    """

    value: ir.Value
    moves: tuple[Move, ...] = ()
    factor: float = 1.0
    path: tuple[ir.Node, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class BiasFeed:
    """One part of the bias: an added tensor of ``dtype``, or boolean tensors with a fill, each at rank 4.

    Parts are summed in their order; where a part that ``overrides`` hides, its fill takes the place of the sum.
    """

    feeds: tuple[Feed, ...]
    keeps: tuple[bool, ...]
    fill: float
    factor: float
    dtype: ir.DataType
    overrides: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """One way to tell batch from heads: ``batch`` and ``heads`` of Q, ``kv_heads`` of K and V."""

    batch: Axis
    heads: Axis
    kv_heads: Axis


def bias_of(
    part: BiasPart,
    heads: Heads,
    rows: Axis,
    columns: Axis,
    dtype: ir.DataType,
    region: Region,
    sources: Sequence[Chain] = (),
) -> BiasFeed:
    """One part of the bias at rank 4; it is fp32 beside fp16 where its fill does not fit that.

    With ``sources``, the operands, a mask of a part of the batch, queries or keys is expanded to all of them.
    """
    values = [part.added] if part.added is not None else [literal.value for literal in part.literals]
    feeds = tuple(_bias_feed(v, part, heads, rows, columns, region, sources) for v in values)
    own = region.shapes.dtype(part.added) if part.added is not None else None
    if own is None:
        # finfo.min of fp32 does not fit fp16; a bias may be fp32 beside an fp16 query.
        fits = part.fill == float("-inf") or abs(part.fill) <= 65504.0 or dtype != ir.DataType.FLOAT16
        own = dtype if fits else ir.DataType.FLOAT
    keeps = tuple(literal.keep for literal in part.literals)
    return BiasFeed(feeds, keeps, part.fill, part.factor, own, part.overrides)


def _bias_feed(
    value: ir.Value,
    part: BiasPart,
    heads: Heads,
    rows: Axis,
    columns: Axis,
    region: Region,
    sources: Sequence[Chain],
) -> Feed:
    """The mask at rank 4, ``[batch or 1, heads or 1, Sq or 1, Skv or 1]``, without the lengths an Expand gave it."""
    chain = follow(value, region.shapes, scalar=None)
    aligned = chain is not None and len(chain.last) <= len(part.axes)
    if chain is not None and aligned:
        for own, scores in zip(reversed(chain.last), reversed(part.axes), strict=False):
            aligned = aligned and (not leaves(own) or (bool(leaves(scores)) and unify(scores, own, region.shapes)))
    if chain is None or not aligned:
        raise _unfit(value, part, "its shape does not broadcast to the scores'")
    groups = [leaves(x) for x in (heads.batch, heads.heads, rows, columns)]
    for index, candidate in enumerate(chain.values):
        wanted = _held_of(groups, chain.axes[index])
        moves = arrange(chain.axes[index], wanted)
        if moves is not None and region.shapes.dtype(candidate) == region.shapes.dtype(value):
            return Feed(candidate, tuple(moves))
    whole = None
    if sources:
        whole = over_whole(value, chain.last, part.axes, (heads.batch, rows, columns), sources, region)
    moves = None if whole is None else arrange(whole.last, _held_of(groups, whole.last))
    if whole is not None and moves is not None:
        return Feed(whole.values[-1], tuple(moves))
    raise _unfit(value, part, "its axes are neither full nor 1 along batch, heads, queries and keys")


def _held_of(groups: Axes, axes: Axes) -> Axes:
    """The groups of which ``axes`` have anything, the others empty."""
    held = {id(a) for axis in axes for a in leaves(axis)}
    return [group if any(id(a) in held for a in group) else [] for group in groups]


def lengths_of(side: Side | None, heads: Heads, region: Region) -> Feed | None:
    """Lengths as ``[B]`` or ``[1]``."""
    if side is None:
        return None
    return _vector(side, [leaves(heads.batch), []], region, "lengths", "one number a batch entry")


def sinks_of(attention: Attention, heads: Heads, region: Region) -> Feed | None:
    """Sinks as ``[Hq]`` or ``[1]``."""
    side = attention.sinks
    return None if side is None else _vector(side, [leaves(heads.heads), []], region, "sink", "one number a head")


def _vector(side: Side, options: list[Axis], region: Region, code: str, what: str) -> Feed:
    """A side input of rank 1 whose axis is one of ``options``."""
    array = g.constant(side.value)
    value = side.value if array is None else region.drafts.constant(_unrepeated(array))
    chain = follow(value, region.shapes, scalar=None)
    aligned = chain is not None and len(chain.last) <= len(side.axes)
    if chain is not None and aligned:
        hidden = {id(a) for a in leaves(chain.expanded)}
        for own, theirs in zip(reversed(chain.last), reversed(side.axes), strict=False):
            held = [a for a in leaves(own) if id(a) not in hidden]
            aligned = aligned and (not held or (bool(leaves(theirs)) and unify(theirs, own, region.shapes)))
        for index, value in enumerate(chain.values):
            for axis in options if aligned else ():
                moves = arrange(chain.axes[index], [axis])
                if moves is not None:
                    return Feed(value, tuple(moves))
    raise Refused(
        code,
        f'"{side.value.name}" is not {what}',
        side.node,
        "leave this attention in standard operators, or report the model",
    )


def _unrepeated(array: np.ndarray) -> np.ndarray:
    """The array with length 1 wherever it repeats itself: exporters fold an Expand of constants into its result."""
    for axis in range(array.ndim):
        first = array.take([0], axis) if array.shape[axis] else array
        array = first if array.shape[axis] and (array == first).all() else array
    return array


def _unfit(value: ir.Value, part: BiasPart, why: str) -> Refused:
    return Refused(
        "bias_shape",
        f'the mask "{value.name}" cannot be brought to [B, H, Sq, Skv]: {why}',
        part.node,
        "give the mask the scores' rank with each dim 1 or full",
    )


def bias_shape_of(biases: tuple[BiasFeed, ...], region: Region) -> list[int | str | None] | None:
    """The bias's shape for the report; None where there is no bias, or its shape is not known."""
    if not biases:
        return None
    shapes = [_moved(region.shapes.shape(f.value) or (), f.moves) for b in biases for f in b.feeds]
    result = region.shapes.broadcast(shapes)
    return None if result is None else named(result)


def named(shape: Shape) -> list[int | str | None]:
    """A shape for the report: numbers, dynamic dims as they are named or computed, None where only run time knows."""

    def one(dim: Dim) -> int | str | None:
        unknown = any(name.startswith("?") for name in dim.symbols)
        return dim.static if dim.static is not None else None if unknown else str(dim)

    return [one(dim) for dim in shape]


def _moved(shape: Shape, moves: Iterable[Move]) -> Shape:
    """The shape after the moves."""
    for move in moves:
        if move.op == "Squeeze":
            shape = tuple(d for i, d in enumerate(shape) if i not in move.numbers)
        elif move.op == "Unsqueeze":
            rest = iter(shape)
            rank = len(shape) + len(move.numbers)
            shape = tuple(ONE if i in move.numbers else next(rest) for i in range(rank))
        elif move.op == "Transpose":
            shape = tuple(shape[i] for i in move.numbers)
        elif move.op == "ComputedReshape":
            shape = tuple(Dim.named("?") if n == -1 else Dim.of(n) for n in move.numbers)
        else:
            total = math.prod(shape, start=ONE)
            kept = [shape[i] if n == 0 else Dim.of(n) for i, n in enumerate(move.numbers)]
            missing = total.divided(math.prod((d for d in kept if d.static != -1), start=ONE))
            shape = tuple((missing or Dim.named("?")) if d.static == -1 else d for d in kept)
    return shape
