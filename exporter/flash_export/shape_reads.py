# SPDX-License-Identifier: Apache-2.0
"""Lengths of scores and probabilities that somebody asks for: lengths of Q and K, whether or not scores exist."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Attention
from flash_export.dims import Dim
from flash_export.drafts import is_draft
from flash_export.layout import LAYOUT_OPS
from flash_export.plan import Plan
from flash_export.region import Region


def answered_elsewhere(
    attention: Attention, plan: Plan, live: Collection[ir.Node], region: Region
) -> list[tuple[ir.Value, ir.Value]]:
    """Every ``Shape`` and ``Size`` of an inner value that stays, and what takes its place; [] where one has no answer.

    Args:
        plan: its nodes make the inner values.
        live: the nodes that would stay beside the plan's node.
    """
    sources = [chain.values[0] for chain in (attention.query, attention.key) if not is_draft(chain.values[0])]
    sources = list(dict.fromkeys([f.value for f in plan.operands[:2] if not is_draft(f.value)] + sources))
    result = []
    for node in _readers(plan, live):
        answer = _answer(node, sources, region)
        if answer is None:
            return []
        result.append((node.outputs[0], answer))
    return result


def _readers(plan: Plan, live: Collection[ir.Node]) -> Iterator[ir.Node]:
    """The live Shape and Size nodes of what only the plan's nodes make, and of views of it."""
    inner = [v for node in plan.nodes for v in node.outputs if v is not plan.output]
    seen = set(inner)
    while inner:
        for node in dict.fromkeys(use.node for use in inner.pop().uses()):
            if node not in live or node in plan.nodes:
                continue
            if g.is_op(node, "Shape", "Size"):
                yield node
            elif g.is_op(node, *LAYOUT_OPS):
                views = [v for v in node.outputs if v not in seen]
                seen.update(views)
                inner += views


def _answer(node: ir.Node, sources: list[ir.Value], region: Region) -> ir.Value | None:
    drafts, shapes = region.drafts, region.shapes
    dims = shapes.contents(node.outputs[0]) if g.is_op(node, "Shape") else shapes.shape(node.inputs[0])
    if dims is None:
        return None
    parts = [_length(shapes.normal(dim), sources, region) for dim in dims]
    known = [p for p in parts if p is not None]
    if len(known) != len(parts) or not known:
        return None
    whole = known[0] if len(known) == 1 else drafts.op("Concat", *known, axis=0)
    # A draft of its own: two Shape nodes must not share one value, each hands its name over.
    return drafts.op("Identity", whole) if g.is_op(node, "Shape") else drafts.op("ReduceProd", whole, keepdims=0)


def _length(dim: Dim, sources: list[ir.Value], region: Region) -> ir.Value | None:
    """``dim`` as an int64 vector of one element: a number, or a length of a source times a number."""
    drafts, shapes = region.drafts, region.shapes
    if dim.static is not None:
        return drafts.numbers(dim.static)
    for value in sources:
        for axis, own in enumerate(shapes.shape(value) or ()):
            factor = None if own.static is not None else dim.divided(shapes.normal(own))
            if factor is None or factor.static is None:
                continue
            length = drafts.op("Gather", drafts.op("Shape", value), drafts.numbers(axis), axis=0)
            return length if factor.static == 1 else drafts.op("Mul", length, drafts.numbers(factor.static))
    return None
