# SPDX-License-Identifier: Apache-2.0
"""Masks that go along a part of the batch, queries or keys, such as one for each window of an image: expanded to all.

The operator's bias has all of each or none of it, and the scores' axes may be merged of several: images and windows, or
the rows and columns of keys that lie on a grid, where a bias of rows is added to one of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from flash_export.dims import ONE
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
    """The length of ``axis`` as a vector of one number: of a tensor's axis that is as long, times known numbers."""
    static = size_of(axis).static
    if static is not None:
        return region.drafts.numbers(static)
    wanted = {id(a) for a in axis}
    for chain in sources:
        for value, axes in zip(chain.values, chain.axes, strict=True):
            for at, candidate in enumerate(axes):
                others = [a for a in leaves(candidate) if id(a) not in wanted]
                if len(leaves(candidate)) - len(others) == len(axis) and size_of(others).static is not None:
                    length = region.drafts.slice(region.drafts.op("Shape", value), 0, at, at + 1)
                    whole = size_of(others)
                    number = region.drafts.numbers(whole.static or 1)
                    return length if whole == ONE else region.drafts.op("Div", length, number)
    return None
