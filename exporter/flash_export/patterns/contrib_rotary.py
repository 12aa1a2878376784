# SPDX-License-Identifier: Apache-2.0
"""The rotation of Q and K inside ONNX Runtime's own attention operators, written in standard operators around the node.

Pair ``(a, b)`` of a head turns by its position's angle: ``(a*cos - b*sin, b*cos + a*sin)``. The pairs are the two
halves of the head's first dims, or neighbours where ``interleaved``; dims behind those of the tables stay as they are.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Refused
from flash_export.patterns.contrib_cache import Cache, positions
from flash_export.region import Region


@dataclasses.dataclass(frozen=True, slots=True)
class Rotation:
    """``cos`` and ``sin`` are ``[B, S, 1, half]``, one angle a pair."""

    cos: ir.Value
    sin: ir.Value
    half: int
    interleaved: bool


def read_rotation(anchor: ir.Node, cache: Cache, region: Region) -> Rotation | None:
    """What a GroupQueryAttention node turns Q and K by; None where it does not.

    Raises:
        Refused: its tables are missing or of unknown size.
    """
    if g.int_attribute(anchor, "do_rotary", 0) != 1:
        return None
    drafts = region.drafts
    tables = [g.input_of(anchor, i) for i in (7, 8)]
    shape = region.shapes.shape(tables[0])
    half = None if shape is None or len(shape) != 2 else shape[1].static
    if tables[0] is None or tables[1] is None or half is None:
        raise Refused(
            "rotary_tables",
            f"do_rotary is 1 and cos_cache has shape {None if shape is None else list(shape)}",
            anchor,
            "give cos_cache and sin_cache as [positions, rotary_dim / 2] with a fixed last dim",
        )
    at = _positions(anchor, cache, region)
    cos, sin = (drafts.unsqueeze(drafts.op("Gather", table, at, axis=0), 2) for table in tables if table is not None)
    return Rotation(cos, sin, half, g.int_attribute(anchor, "rotary_interleaved", 0) == 1)


def _positions(anchor: ir.Node, cache: Cache, region: Region) -> ir.Value:
    """``[B, S]``: the given positions, else those behind the cache."""
    drafts = region.drafts
    own, row = g.input_of(anchor, 9), positions(cache.seqlen_q, region)
    if own is None:
        return drafts.op("Add", drafts.unsqueeze(cache.past, 1), row)
    # A prompt counts on from the first position of the first entry, whatever the others are.
    first = drafts.op("Slice", own, drafts.numbers(0, 0), drafts.numbers(1, 1))
    prompt = drafts.op("Equal", cache.limit, cache.seqlen_q)
    return drafts.op("Where", prompt, drafts.op("Add", first, row), own)


def rotated(value: ir.Value, heads: int, depth: int, rotation: Rotation, region: Region) -> ir.Value:
    """``[B, S, H, D]`` of an operand ``[B, S, H*D]``, rotated."""
    drafts, half = region.drafts, rotation.half
    apart = drafts.reshape(value, 0, 0, heads, depth)
    if rotation.interleaved:
        pairs = drafts.reshape(drafts.slice(apart, 3, 0, 2 * half), 0, 0, heads, half, 2)
        a, b = (drafts.squeeze(drafts.slice(pairs, 4, i, i + 1), 4) for i in (0, 1))
    else:
        a, b = (drafts.slice(apart, 3, start, start + half) for start in (0, half))
    cos, sin = rotation.cos, rotation.sin
    turned = [
        drafts.op("Sub", drafts.op("Mul", a, cos), drafts.op("Mul", b, sin)),
        drafts.op("Add", drafts.op("Mul", b, cos), drafts.op("Mul", a, sin)),
    ]
    if rotation.interleaved:
        wide = drafts.op("Concat", *(drafts.unsqueeze(t, 4) for t in turned), axis=4)
        turned = [drafts.reshape(wide, 0, 0, heads, 2 * half)]
    if 2 * half < depth:
        turned.append(drafts.slice(apart, 3, 2 * half, depth))
    return turned[0] if len(turned) == 1 else drafts.op("Concat", *turned, axis=3)
