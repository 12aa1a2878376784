# SPDX-License-Identifier: Apache-2.0
"""Q, K and V that are parts of one tensor ``[B, S, (Hq + 2*Hkv)*D]``, whichever operators take it apart."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from flash_export import graph as g
from flash_export.dims import Dim
from flash_export.layout import Axes, Axis, Chain, follow, leaves, size_of, unify
from flash_export.shapes import Shapes


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """``value`` is ``start`` to ``stop`` of an axis of ``source``; with ``drops`` the axis itself is gone."""

    node: ir.Node
    source: ir.Value
    axis: int
    start: int
    stop: int
    drops: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """The packed tensor, followed upwards, the axes it must have, and the nodes that take it apart."""

    chain: Chain
    wanted: Axes
    nodes: tuple[ir.Node, ...]


def part_of(value: ir.Value, shapes: Shapes) -> Part | None:
    """What a Split, a Slice of one axis or a Gather of one index takes from its source; None for anything else."""
    node = value.producer()
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    shape = shapes.shape(node.inputs[0])
    if shape is None:
        return None
    if g.is_op(node, "Split"):
        return _split(node, value, len(shape), shapes)
    if g.is_op(node, "Gather"):
        index = g.constant(g.input_of(node, 1))
        axis = g.int_attribute(node, "axis", 0) % len(shape)
        length = shape[axis].static
        if index is None or index.ndim != 0 or length is None:
            return None
        at = int(index) % length
        return Part(node, node.inputs[0], axis, at, at + 1, True)
    return _slice(node, shape, shapes) if g.is_op(node, "Slice") else None


def _split(node: ir.Node, value: ir.Value, rank: int, shapes: Shapes) -> Part | None:
    assert node.inputs[0] is not None
    axis = g.int_attribute(node, "axis", 0) % rank
    start = 0
    for output in node.outputs:
        shape = shapes.shape(output)
        length = None if shape is None else shape[axis].static
        if length is None:
            return None
        if output is value:
            return Part(node, node.inputs[0], axis, start, start + length, False)
        start += length
    return None


def _slice(node: ir.Node, shape: tuple[Dim, ...], shapes: Shapes) -> Part | None:
    assert node.inputs[0] is not None
    bounds = [shapes.contents(v) for v in node.inputs[1:]]
    if len(bounds) < 2 or any(b is None or len(b) != 1 or b[0].static is None for b in bounds):
        return None
    start, stop, axis, step = ([b[0].static for b in bounds if b is not None] + [0, 1][len(bounds) - 2 :])[:4]
    assert start is not None
    assert stop is not None
    assert axis is not None
    length = shape[axis % len(shape)].static
    if length is None or step != 1:
        return None
    taken = range(length)[start:stop]
    return Part(node, node.inputs[0], axis % len(shape), taken.start, taken.stop, False)


def packed(
    chains: tuple[Chain, Chain, Chain], inner: tuple[Axis, Axis, Axis], batch: Axis, rows: Axis, shapes: Shapes
) -> Packed | None:
    """The one tensor that Q, K and V make up, in this order and without a gap; None where there is none.

    Args:
        chains: query, key and value.
        inner: the heads and the head dim of each, outermost first.
        batch: the atoms of the batch.
        rows: the atoms of the one length.
        shapes: symbolic shapes of the graph.
    """
    parts = [part_of(chain.values[0], shapes) for chain in chains]
    q, k, v = parts
    if q is None or k is None or v is None or not (q.source is k.source is v.source and q.axis == k.axis == v.axis):
        return None
    whole = follow(q.source, shapes, scalar=None)
    if whole is None:
        return None
    length = size_of(whole.last[q.axis]).static
    if (q.start, k.start, v.start, v.stop) != (0, q.stop, k.stop, length):
        return None
    rests = [_rest(c, p, w, whole, shapes) for c, p, w in zip(chains, (q, k, v), inner, strict=True)]
    first = rests[0]
    if first is None or any(r is None or leaves(r) != leaves(first) for r in rests):
        return None
    wanted = [leaves(batch), leaves(rows), leaves(whole.last[q.axis]) + leaves(first)]
    return Packed(whole, wanted, (q.node, k.node, v.node))


def _rest(chain: Chain, part: Part, inner: Axis, whole: Chain, shapes: Shapes) -> Axis | None:
    """What of an operand's heads and head dim lies in other axes than the one that is taken apart."""
    own = list(chain.axes[0])
    if part.drops:
        own.insert(part.axis, [])
    for i, (mine, theirs) in enumerate(zip(own, whole.last, strict=True)):
        if i != part.axis and not unify(theirs, mine, shapes):
            return None
    taken, atoms = leaves(own[part.axis]), leaves(inner)
    return atoms[len(taken) :] if atoms[: len(taken)] == taken else None
