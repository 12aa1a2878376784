# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's ``com.microsoft.GroupQueryAttention``, with and without a cache, rotation and sinks of its own.

Behind a cache the node stands in the lower right corner of as many keys as its lengths say. Where a prompt is padded
on the right, that corner is the end of the padding: rows of tokens never reach it, and those of the padding are
unspecified by the operator.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.bands import Band
from flash_export.canonical import Attention, Refused
from flash_export.patterns.contrib_cache import Cache, Places, read_cache
from flash_export.patterns.contrib_inputs import require_inputs
from flash_export.patterns.contrib_rotary import read_rotation, rotated
from flash_export.patterns.operator import (
    Operator,
    attention_of,
    behind,
    float_of,
    heads_first,
    is_used,
    refuse_inputs,
    refuse_scores,
)
from flash_export.region import Region


def read(anchor: ir.Node, region: Region) -> Attention:
    """The attention that a ``GroupQueryAttention`` node computes.

    Raises:
        Refused: its cache is quantized or evicts keys, it normalises Q and K, or its probabilities are an output.
    """
    require_inputs(anchor, region)
    refuse_scores(anchor, 3)
    _refuse_unknown(anchor)
    heads, kv_heads = (g.int_attribute(anchor, name, 0) for name in ("num_heads", "kv_num_heads"))
    query, key, value = _operands(anchor, heads, kv_heads, region)
    cache = read_cache(anchor, region)
    query, key = _rotated(anchor, cache, (query, key), (heads, kv_heads), region)
    new = [heads_first(anchor, v, kv_heads, "kv"[i], region) for i, v in enumerate((key, value))]
    past = [g.input_of(anchor, i) for i in (3, 4)]
    causal = bool(g.int_attribute(anchor, "causal", 1))
    window = g.int_attribute(anchor, "local_window_size", -1)
    if past[0] is not None and past[1] is not None:
        depth = _depth(anchor, new[0], region)
        places = Places(cache, past[0], region)
        present = [places.fill(p, v, kv_heads, depth) for p, v in zip(past, new, strict=True) if p is not None]
        lengths = region.drafts.op("Add", cache.past, cache.seqlen_q) if causal else cache.total
    else:
        present = [
            behind(None, v, region) if _is_output(anchor, i) else plain
            for i, (v, plain) in enumerate(zip(new, (key, value), strict=True), start=1)
        ]
        lengths = cache.total
    bias, sinks = g.input_of(anchor, 10), g.input_of(anchor, 11)
    if sinks is None and g.int_attribute(anchor, "smooth_softmax", 0) == 1:
        sinks = region.drafts.constant(np.zeros(1, dtype=np.float32))
    operator = Operator(
        query,
        present[0],
        present[1],
        heads,
        kv_heads,
        scale=float_of(anchor, "scale", 0.0) or None,
        softcap=float_of(anchor, "softcap", 0.0),
        masks=() if bias is None else (bias,),
        band=Band(window - 1 if window > 0 else None, 0, past[0] is not None, False) if causal else None,
        flat=True,
        lengths=lengths,
        sinks=sinks,
        also=tuple((v, p) for v, p in zip(anchor.outputs[1:3], present, strict=False) if is_used(v)),
    )
    return attention_of(anchor, operator, region)


def _refuse_unknown(anchor: ir.Node) -> None:
    refuse_inputs(anchor, {12: "k_scale", 13: "v_scale"}, "quantized", "export with a cache that is not quantized")
    refuse_inputs(
        anchor,
        {14: "q_norm_weight", 15: "k_norm_weight"},
        "contrib_operator",
        "export with the norms of Q and K as nodes of their own",
    )
    if g.int_attribute(anchor, "local_window_size", -1) == 0:
        raise Refused("attribute_range", "local_window_size is 0: no query sees a key", anchor, "give -1 for no window")
    if g.int_attribute(anchor, "sliding_window_cache", 0):
        raise Refused(
            "cache_in_place",
            "the operator drops keys from a cache of the window's size by itself",
            anchor,
            "export with a cache of the full length (sliding_window_cache=0); the window stays an attribute",
        )


def _rotated(
    anchor: ir.Node, cache: Cache, operands: tuple[ir.Value, ir.Value], heads: tuple[int, int], region: Region
) -> tuple[ir.Value, ir.Value]:
    """Q and K as ``[B, S, H*D]``, turned by their positions where the operator does that."""
    rotation = read_rotation(anchor, cache, region)
    if rotation is None:
        return operands
    depth = _depth(anchor, heads_first(anchor, operands[1], heads[1], "k", region), region)
    query, key = (
        region.drafts.reshape(rotated(v, n, depth, rotation, region), 0, 0, n * depth)
        for v, n in zip(operands, heads, strict=True)
    )
    return query, key


def _depth(anchor: ir.Node, key: ir.Value, region: Region) -> int:
    """The head dim of K as ``[B, H, S, D]``."""
    shape = region.shapes.shape(key)
    depth = None if shape is None else shape[3].static
    if depth is None:
        raise Refused("head_dim_dynamic", "the head dim is dynamic", anchor, "export with a static head dim")
    return depth


def _is_output(anchor: ir.Node, index: int) -> bool:
    return len(anchor.outputs) > index and is_used(anchor.outputs[index])


def _operands(anchor: ir.Node, heads: int, kv_heads: int, region: Region) -> list[ir.Value]:
    """Query, key and value, the three parts of the first input where it is packed."""
    query, key, value = (g.input_of(anchor, i) for i in range(3))
    assert query is not None
    if key is not None and value is not None:
        return [query, key, value]
    shape = region.shapes.shape(query)
    width = None if shape is None or len(shape) != 3 else shape[2].static
    if width is None or not kv_heads or width % (heads + 2 * kv_heads):
        raise Refused("head_count", f"a packed query of shape {shape}", anchor, "check the model in ONNX Runtime")
    depth = width // (heads + 2 * kv_heads)
    stops = [heads * depth, (heads + kv_heads) * depth, width]
    starts = [0, *stops[:2]]
    return [region.drafts.slice(query, 2, start, stop) for start, stop in zip(starts, stops, strict=True)]
