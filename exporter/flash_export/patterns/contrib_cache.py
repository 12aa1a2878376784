# SPDX-License-Identifier: Apache-2.0
"""The cache of ``com.microsoft.GroupQueryAttention``: new keys and values stand behind as many old ones as lengths say.

A batch entry that holds ``T = seqlens_k + 1`` keys after the step had ``T - S`` before it, or none where a prompt is
padded on the right. The old ones lie at the front of ``past``, which may be a longer buffer; the new ones follow them
without a gap, and zeros follow those. Read from the operator's text and its CPU kernel in ONNX Runtime 1.32.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Refused
from flash_export.region import Region


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """Where a node's new keys go.

    ``total`` int64 ``[B]``: the keys of each batch entry after the step. ``past`` int64 ``[B]``: before it.
    ``seqlen_q`` and ``limit`` are int64 scalars: the new keys, and the operator's ``total_sequence_length``. ``valid``
    int64 ``[B]``: how many of the new keys count, where the operator is told.
    """

    total: ir.Value
    past: ir.Value
    seqlen_q: ir.Value
    limit: ir.Value
    valid: ir.Value | None


def read_cache(anchor: ir.Node, region: Region) -> Cache:
    """The lengths of a GroupQueryAttention node, written down.

    Raises:
        Refused: ``lengths`` where it is not given any.
    """
    drafts = region.drafts
    query, seqlens, limit = (g.input_of(anchor, i) for i in (0, 5, 6))
    if query is None or seqlens is None or limit is None:
        raise Refused("lengths", "seqlens_k or total_sequence_length is missing", anchor, "check it in ONNX Runtime")
    total = drafts.op("Add", wide(seqlens, region), drafts.numbers(1))
    seqlen_q = length(query, 1, region)
    counts = g.input_of(anchor, 16)
    valid = None if counts is None else wide(counts, region)
    past = drafts.op("Max", drafts.op("Sub", total, valid or seqlen_q), drafts.numbers(0))
    flat = drafts.op("Reshape", wide(limit, region), drafts.numbers())
    return Cache(total, past, seqlen_q, flat, valid)


def wide(value: ir.Value, region: Region) -> ir.Value:
    """An integer tensor as int64."""
    return region.drafts.op("Cast", value, to=int(ir.DataType.INT64))


def length(value: ir.Value, axis: int, region: Region) -> ir.Value:
    """The length of an axis, an int64 scalar."""
    index = region.drafts.constant(np.array(axis, dtype=np.int64))
    return region.drafts.op("Gather", region.drafts.op("Shape", value), index, axis=0)


def positions(count: ir.Value, region: Region) -> ir.Value:
    """``0 .. count - 1``."""
    zero, one = (region.drafts.constant(np.array(n, dtype=np.int64)) for n in (0, 1))
    return region.drafts.op("Range", zero, count, one)


class Places:
    """Which row of ``[past, new, one row of zeros]`` stands at each position of the cache after the step."""

    def __init__(self, cache: Cache, past: ir.Value, region: Region) -> None:
        drafts = region.drafts
        self._region = region
        old = length(past, 2, region)
        position = positions(drafts.op("Max", old, cache.limit), region)
        beyond = drafts.op("Sub", position, drafts.unsqueeze(cache.past, 1))
        if cache.valid is None:
            row = drafts.op("Min", beyond, cache.seqlen_q)
        else:
            counts = drafts.op("Less", beyond, drafts.unsqueeze(cache.valid, 1))
            row = drafts.op("Where", counts, beyond, cache.seqlen_q)
        new = drafts.op("Add", row, old)
        zero = drafts.constant(np.array(0, dtype=np.int64))
        index = drafts.op("Where", drafts.op("Less", beyond, zero), position, new)
        self._index = drafts.unsqueeze(index, 1)

    def fill(self, past: ir.Value, new: ir.Value, heads: int, depth: int) -> ir.Value:
        """The cache after the step, ``[B, H, max(past buffer, total_sequence_length), D]``.

        One Gather along the rows of all heads: its indices are D times fewer than the numbers it moves.
        """
        drafts = self._region.drafts
        padded = drafts.op("Pad", new, drafts.numbers(0, 0, 0, 0, 0, 0, 1, 0))
        rows = drafts.op("Concat", past, padded, axis=2)
        blocks = drafts.op("Mul", length(past, 0, self._region), drafts.constant(np.array(heads, dtype=np.int64)))
        first = drafts.op("Mul", positions(blocks, self._region), length(rows, 2, self._region))
        index = drafts.op("Add", drafts.reshape(first, -1, heads, 1), self._index)
        return drafts.op("Gather", drafts.reshape(rows, -1, depth), index, axis=0)
