# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's ``com.microsoft.GroupQueryAttention``, as far as a prompt without a cache.

With a cache the operator places the new keys by lengths that only run time knows, and its own rotation reads positions
from them; both are refused.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.bands import Band
from flash_export.canonical import Attention, Refused
from flash_export.patterns.contrib_multihead import refuse_inputs
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

_UNKNOWN = {
    3: "past_key",
    4: "past_value",
    7: "cos_cache",
    8: "sin_cache",
    12: "k_scale",
    13: "v_scale",
    14: "q_norm_weight",
    15: "k_norm_weight",
    16: "query_seqlens",
}


def read(anchor: ir.Node, region: Region) -> Attention:
    """The attention that a ``GroupQueryAttention`` node computes.

    Raises:
        Refused: it has a past, rotates, is quantized, or its probabilities are an output.
    """
    refuse_scores(anchor, 3)
    refuse_inputs(anchor, _UNKNOWN)
    if g.int_attribute(anchor, "smooth_softmax", 0) or g.int_attribute(anchor, "do_rotary", 0):
        raise Refused("contrib_operator", "the operator rotates, or smooths its softmax", anchor, "export from PyTorch")
    heads, kv_heads = (g.int_attribute(anchor, name, 0) for name in ("num_heads", "kv_num_heads"))
    query, key, value = _operands(anchor, heads, kv_heads, region)
    present = [
        behind(None, heads_first(anchor, v, kv_heads, "kv"[i], region), region) if _is_output(anchor, i + 1) else v
        for i, v in enumerate((key, value))
    ]
    window = g.int_attribute(anchor, "local_window_size", -1)
    causal = bool(g.int_attribute(anchor, "causal", 1))
    lengths, bias = g.input_of(anchor, 5), g.input_of(anchor, 10)
    if lengths is not None:
        lengths = region.drafts.op("Add", lengths, region.drafts.constant(np.array([1], dtype=np.int32)))
    operator = Operator(
        query,
        present[0],
        present[1],
        heads,
        kv_heads,
        scale=float_of(anchor, "scale", 0.0) or None,
        softcap=float_of(anchor, "softcap", 0.0),
        masks=() if bias is None else (bias,),
        band=Band(window - 1 if window > 0 else None, 0, False, False) if causal else None,
        flat=True,
        lengths=lengths,
        sinks=g.input_of(anchor, 11),
        also=tuple((v, p) for v, p in zip(anchor.outputs[1:3], present, strict=False) if is_used(v)),
    )
    return attention_of(anchor, operator, region)


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
