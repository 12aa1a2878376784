# SPDX-License-Identifier: Apache-2.0
"""Masks that go along a part of the batch, queries or keys, such as one for each window of an image: expanded to all.

The operator's bias has all of each or none of it, and the scores' axes may be merged of several: images and windows, or
the rows and columns of keys that lie on a grid, where a bias of rows is added to one of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from flash_export.layout import Axes, Axis, Chain, leaves, size_of
from flash_export.region import Region


def over_whole(
    value: ir.Value, own: Axes, scores: Axes, groups: Sequence[Axis], sources: Sequence[Chain], region: Region
) -> Chain | None:
    """``value`` along all of each group that it has a part of; None where there is none, or a length is not to be had.

    Args:
        own: the axes of ``value``, of which the last is that of the last one of ``scores``.
        groups: batch, queries and keys.
        sources: operands that have these.
    """
    own = [*([[]] * (len(scores) - len(own))), *own]
    held = {id(a) for axis in own for a in leaves(axis)}
    inside = [{id(a) for a in leaves(group)} for group in groups]
    partly = [group for group in inside if group & held]
    lacks = [
        bool(leaves(axis)) and not leaves(mine) and any({id(a) for a in leaves(axis)} <= group for group in partly)
        for axis, mine in zip(scores, own, strict=True)
    ]
    if not any(lacks):
        return None
    one = region.drafts.numbers(1)
    sources = [*sources, Chain([value], [], [own[len(own) - len(region.shapes.shape(value) or own) :]], [], [])]
    lengths = []
    for axis, lack in zip(scores, lacks, strict=True):
        length = _length(leaves(axis), sources, region) if lack else one
        if length is None:
            return None
        lengths.append(length)
    target = region.drafts.op("Concat", *lengths, axis=0)
    axes = [axis if lack else mine for axis, mine, lack in zip(scores, own, lacks, strict=True)]
    return Chain([region.drafts.op("Expand", value, target)], [], [axes], [], [])


def _length(axis: Axis, sources: Sequence[Chain], region: Region) -> ir.Value | None:
    """The length of ``axis`` as a vector of one number: that of a tensor's axis, by that of all else in this."""
    drafts = region.drafts
    found = _known_length(axis, sources, region)
    if found is not None:
        return found
    wanted = {id(a) for a in axis}
    for chain in sources:
        for value, axes in zip(chain.values, chain.axes, strict=True):
            for at, candidate in enumerate(axes):
                others = [a for a in leaves(candidate) if id(a) not in wanted]
                rest = (
                    _known_length(others, sources, region)
                    if len(leaves(candidate)) == len(axis) + len(others)
                    else None
                )
                if rest is not None:
                    # Of nothing, an integer division by 0 would end the process.
                    return drafts.op("Div", drafts.slice(drafts.op("Shape", value), 0, at, at + 1), _some(rest, region))
    return None


def _known_length(axis: Axis, sources: Sequence[Chain], region: Region) -> ir.Value | None:
    """The length of ``axis`` where it is a number, or that of an axis of a tensor."""
    drafts, static = region.drafts, size_of(axis).static
    if static is not None:
        return drafts.numbers(static)
    wanted = [id(a) for a in axis]
    for chain in sources:
        for value, axes in zip(chain.values, chain.axes, strict=True):
            for at, candidate in enumerate(axes):
                if [id(a) for a in leaves(candidate)] == wanted:
                    return drafts.slice(drafts.op("Shape", value), 0, at, at + 1)
    return None


def _some(length: ir.Value, region: Region) -> ir.Value:
    """``length`` where it is 1 or more, else 1; a known one as it is."""
    return length if length.const_value is not None else region.drafts.op("Max", length, region.drafts.numbers(1))
