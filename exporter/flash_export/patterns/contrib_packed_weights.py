# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's ``com.microsoft.Attention``: the projection of Q, K and V lies inside the operator.

The projection is written out beside the node, which then reads its three parts, or the packed result itself. A cache
is one tensor of keys and values, ``[2, B, H, S, D]``.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Attention, Refused
from flash_export.patterns.contrib_inputs import require_inputs
from flash_export.patterns.contrib_multihead import band_behind, key_padding
from flash_export.patterns.operator import (
    SEPARATE,
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
    """The attention that an ``Attention`` node of com.microsoft computes.

    Raises:
        Refused: it rotates, writes into its cache in place, or its sizes are not known.
    """
    require_inputs(anchor, region)
    refuse_scores(anchor, 2)
    refuse_inputs(anchor, {6: "past_sequence_length"}, "cache_in_place", SEPARATE)
    if g.int_attribute(anchor, "do_rotary", 0):
        raise Refused(
            "contrib_operator",
            "the operator rotates Q and K by tables of its own, which its text does not define",
            anchor,
            "export with RotaryEmbedding or standard operators before the attention",
        )
    query, new_key, new_value = _projected(anchor, region)
    heads = g.int_attribute(anchor, "num_heads", 0)
    key, value, also = _cached(anchor, new_key, new_value, heads, region)
    masks = key_padding(anchor, 3, query, key, region)
    bias, past = g.input_of(anchor, 5), g.input_of(anchor, 4)
    causal = g.int_attribute(anchor, "unidirectional", 0) == 1
    operator = Operator(
        query,
        key,
        value,
        heads,
        heads,
        scale=float_of(anchor, "scale", 0.0) or None,
        masks=masks if bias is None else (*masks, bias),
        band=band_behind(anchor, causal, query, new_key, past, region),
        flat=True,
        also=also,
    )
    return attention_of(anchor, operator, region)


def _cached(
    anchor: ir.Node, key: ir.Value, value: ir.Value, heads: int, region: Region
) -> tuple[ir.Value, ir.Value, tuple[tuple[ir.Value, ir.Value], ...]]:
    """Key and value behind the past, and what takes the place of the ``present`` output."""
    drafts, past = region.drafts, g.input_of(anchor, 4)
    present = anchor.outputs[1] if len(anchor.outputs) > 1 and is_used(anchor.outputs[1]) else None
    if past is None and present is None:
        return key, value, ()
    halves = [None, None] if past is None else [drafts.squeeze(drafts.slice(past, 0, i, i + 1), 0) for i in (0, 1)]
    joined = [
        behind(half, heads_first(anchor, v, heads, which, region), region)
        for half, v, which in zip(halves, (key, value), "kv", strict=True)
    ]
    if present is None:
        return joined[0], joined[1], ()
    whole = drafts.op("Concat", *(drafts.unsqueeze(v, 0) for v in joined), axis=0)
    return joined[0], joined[1], ((present, whole),)


def _projected(anchor: ir.Node, region: Region) -> tuple[ir.Value, ir.Value, ir.Value]:
    """``input . weights + bias`` and its three parts."""
    drafts = region.drafts
    source, weights, bias = (g.input_of(anchor, i) for i in range(3))
    assert source is not None
    assert weights is not None
    shape, sizes = region.shapes.shape(weights), g.ints_attribute(anchor, "qkv_hidden_sizes")
    width = None if shape is None or len(shape) != 2 else shape[1].static
    if width is None:
        raise Refused("operand_shapes", "the weights' size is not known", anchor, "state the shapes of the weights")
    sizes = sizes or [width // 3] * 3
    if len(sizes) != 3 or min(sizes) < 1 or sum(sizes) != width:
        raise Refused(
            "operand_shapes", f"sizes {sizes} of weights {width} wide", anchor, "check the model in ONNX Runtime"
        )
    whole = drafts.op("MatMul", source, weights)
    if bias is not None:
        whole = drafts.op("Add", whole, bias)
    stops = [sizes[0], sizes[0] + sizes[1], width]
    query, key, value = (
        drafts.slice(whole, 2, start, stop) for start, stop in zip([0, *stops[:2]], stops, strict=True)
    )
    return query, key, value
