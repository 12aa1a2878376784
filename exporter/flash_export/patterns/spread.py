# SPDX-License-Identifier: Apache-2.0
"""Operands that a product broadcasts: queries that are learned and shared by a batch, keys of a memory that all read.

The operator has no broadcasting but that of grouped heads, so an Expand is written down where the product made none.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export.layout import Axes, Axis, Chain, leaves, size_of
from flash_export.region import Product, Region


def spread(
    query: Chain,
    key: Chain,
    value: Chain,
    products: tuple[tuple[ir.Node, Product], tuple[ir.Node, Product]],
    region: Region,
) -> tuple[Chain, Chain, Chain]:
    """Q, K and V over the outer axes of their products, but for the heads that K and V both share.

    Args:
        query, key, value: the operands; each of an aligned product of two tensors.
        products: the node and the axes of the first and of the second product.
        region: where drafts are written.
    """
    (first, scores), (second, result) = products
    if {first.op_type, second.op_type} != {"MatMul"}:
        return query, key, value
    grouped = _grouped([a for axis in scores.axes[:-2] for a in leaves(axis)], key, value)
    sources = (query, key, value)
    outer = (scores.axes[:-2], scores.axes[:-2], result.axes[:-2])
    keep: tuple[set[int], ...] = (set(), grouped, grouped)
    found = [_over(c, axes, ids, sources, region) for c, axes, ids in zip(sources, outer, keep, strict=True)]
    return found[0], found[1], found[2]


def _grouped(outer: Axis, key: Chain, value: Chain) -> set[int]:
    """The innermost atoms that neither K nor V has: heads that share them."""
    held = {id(a) for chain in (key, value) for axis in chain.last for a in leaves(axis)}
    found: set[int] = set()
    for atom in reversed(outer):
        if id(atom) in held or atom.size.static is None:
            break
        found.add(id(atom))
    return found


def _over(chain: Chain, outer: Axes, kept: set[int], sources: tuple[Chain, ...], region: Region) -> Chain:
    """``chain`` expanded along each axis of ``outer`` of which it has nothing, those of ``kept`` apart."""
    own: Axes = [*([[]] * (len(outer) + 2 - len(chain.last))), *chain.last[:-2]]
    lacks = [
        bool(leaves(axis)) and not leaves(mine) and not {id(a) for a in leaves(axis)} & kept
        for axis, mine in zip(outer, own, strict=True)
    ]
    if not any(lacks):
        return chain
    lengths = [
        _length(leaves(axis), sources, region) if lack else None for axis, lack in zip(outer, lacks, strict=True)
    ]
    if any(lack and length is None for lack, length in zip(lacks, lengths, strict=True)):
        return chain
    one = region.drafts.numbers(1)
    target = region.drafts.op("Concat", *(length or one for length in lengths), one, one, axis=0)
    axes = [axis if lack else mine for axis, mine, lack in zip(outer, own, lacks, strict=True)]
    return Chain([region.drafts.op("Expand", chain.values[-1], target)], [], [[*axes, *chain.last[-2:]]], [], [])


def _length(axis: Axis, sources: tuple[Chain, ...], region: Region) -> ir.Value | None:
    """The length of ``axis`` as a vector of one number, read as far up as it is the axis of a tensor."""
    static = size_of(axis).static
    if static is not None:
        return region.drafts.numbers(static)
    for chain in sources:
        for value, axes in zip(chain.values, chain.axes, strict=True):
            at = next((i for i, candidate in enumerate(axes) if leaves(candidate) == axis), None)
            if at is not None:
                return region.drafts.slice(region.drafts.op("Shape", value), 0, at, at + 1)
    return None
