# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's ``com.microsoft.Attention``: the projection of Q, K and V lies inside the operator.

The projection is written out beside the node, which then reads its three parts, or the packed result itself.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Attention, Refused
from flash_export.patterns.contrib_multihead import band_behind, key_padding, refuse_inputs
from flash_export.patterns.operator import Operator, attention_of, float_of, is_used, refuse_scores
from flash_export.region import Region


def read(anchor: ir.Node, region: Region) -> Attention:
    """The attention that an ``Attention`` node of com.microsoft computes.

    Raises:
        Refused: it rotates, has a cache, or its sizes are not known.
    """
    refuse_scores(anchor, 2)
    refuse_inputs(anchor, {4: "past", 6: "past_sequence_length"})
    if g.int_attribute(anchor, "do_rotary", 0) or any(is_used(v) for v in anchor.outputs[1:]):
        raise Refused(
            "contrib_operator", "the operator rotates or keeps a cache by itself", anchor, "export from PyTorch"
        )
    query, key, value = _projected(anchor, region)
    heads = g.int_attribute(anchor, "num_heads", 0)
    masks = key_padding(anchor, 3, query, key, region)
    bias = g.input_of(anchor, 5)
    operator = Operator(
        query,
        key,
        value,
        heads,
        heads,
        scale=float_of(anchor, "scale", 0.0) or None,
        masks=masks if bias is None else (*masks, bias),
        band=band_behind(anchor, bool(g.int_attribute(anchor, "unidirectional", 0)), query, key, None, region),
        flat=True,
    )
    return attention_of(anchor, operator, region)


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
    whole = drafts.op("MatMul", source, weights)
    if bias is not None:
        whole = drafts.op("Add", whole, bias)
    stops = [sizes[0], sizes[0] + sizes[1], width]
    query, key, value = (
        drafts.slice(whole, 2, start, stop) for start, stop in zip([0, *stops[:2]], stops, strict=True)
    )
    return query, key, value
