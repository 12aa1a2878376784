# SPDX-License-Identifier: Apache-2.0
"""The standard ``Attention`` operator (opset 23 and newer), in its 4-D and its 3-D form, with and without a cache.

Its text (errata of onnx 1.23 included) places query i on the diagonal at key ``i + offset``: the length of ``past_key``
where there is one, ``nonpad_kv_seqlen - Sq`` where that is given, else 0. A cache is written out as the Concat that the
text defines, around the node.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.bands import Band
from flash_export.canonical import Attention, Refused
from flash_export.dims import Dim
from flash_export.layout import size_of
from flash_export.patterns.operator import (
    Operator,
    attention_of,
    behind,
    float_of,
    heads_first,
    is_used,
    refuse_scores,
)
from flash_export.region import Region

INPUTS = ("query", "key", "value", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


ATTRIBUTES = {
    "is_causal",
    "kv_num_heads",
    "left_window_size",
    "q_num_heads",
    "qk_matmul_output_mode",
    "right_window_size",
    "scale",
    "softcap",
    "softmax_precision",
}
"""What opset 23 to 26 define; FlashAttention accumulates in fp32 whatever ``softmax_precision`` asks for."""


def read(anchor: ir.Node, region: Region) -> Attention:
    """The attention that an ``Attention`` node computes.

    Raises:
        Refused: its scores are an output, an attribute is unknown, or its diagonal fits neither corner.
    """
    _refuse_unknown(anchor)
    refuse_scores(anchor, 3)
    heads, kv_heads = (g.int_attribute(anchor, f"{which}_num_heads", 0) for which in ("q", "kv"))
    rows, new_length = (size_of(region.operand(_input(anchor, i), anchor, scalars=False).last[-2]) for i in (0, 1))
    operands = [_present(anchor, index, kv_heads, region) for index in (1, 2)]
    mask, scale = g.input_of(anchor, 3), anchor.attributes.get("scale")
    operator = Operator(
        _input(anchor, 0),
        operands[0],
        operands[1],
        heads,
        kv_heads,
        scale=None if scale is None else float(scale.as_float()),
        softcap=float_of(anchor, "softcap", 0.0),
        masks=() if mask is None else (mask,),
        band=_band(anchor, rows, new_length, region),
        lengths=g.input_of(anchor, 6),
        also=tuple((v, p) for v, p in zip(anchor.outputs[1:3], operands, strict=False) if is_used(v)),
    )
    return attention_of(anchor, operator, region)


def _present(anchor: ir.Node, index: int, heads: int, region: Region) -> ir.Value:
    """Key (1) or value (2) as attention reads it, behind the past where there is a cache."""
    value, past = _input(anchor, index), g.input_of(anchor, index + 3)
    if past is None and not (len(anchor.outputs) > index and is_used(anchor.outputs[index])):
        return value
    return behind(past, heads_first(anchor, value, heads, "qkv"[index], region), region)


def _input(anchor: ir.Node, index: int) -> ir.Value:
    value = g.input_of(anchor, index)
    assert value is not None, "the checker refuses an Attention node without query, key and value"
    return value


def _refuse_unknown(anchor: ir.Node) -> None:
    unknown = sorted(set(anchor.attributes) - ATTRIBUTES) + [str(v.name) for v in anchor.inputs[len(INPUTS) :] if v]
    if unknown:
        raise Refused(
            "unknown_attribute",
            f"the operator has {', '.join(unknown)}, which this version does not know",
            anchor,
            "export at opset 23 or 24, or write the mask in standard operators",
        )


def _band(anchor: ir.Node, rows: Dim, new_length: Dim, region: Region) -> Band | None:
    causal = bool(g.int_attribute(anchor, "is_causal", 0))
    window = [g.int_attribute(anchor, f"{side}_window_size", -1) for side in ("left", "right")]
    left, right = (None if size < 0 else size for size in window)
    right = 0 if causal else right
    past = region.shapes.shape(g.input_of(anchor, 4))
    if left is None and right is None:
        return None
    if past is None:
        return Band(left, right, g.input_of(anchor, 6) is not None, False)
    if region.shapes.normal(rows) == region.shapes.normal(new_length):
        return Band(left, right, True, False)
    offset = past[2].static
    if offset is None or (left is not None and left < offset):
        raise Refused(
            "causal_alignment",
            f"{new_length} keys and {rows} queries follow a cache of {past[2]}: the diagonal lies in neither corner",
            anchor,
            "give the operator as many new keys as queries, or pass the mask as a tensor",
        )
    return Band(None if left is None else left - offset, None if right is None else right + offset, False, False)
