# SPDX-License-Identifier: Apache-2.0
"""The pattern: reads ``acme::TemperedAttention``, an operator of one company's own, as attention.

A pattern is one function from the node and what is known around it to the canonical form. Everything else - which
FlashAttention operator, which layout, the proof - follows from that form. Importing this file registers it, which is
all that ``flash-export --pattern tempered_attention`` does.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from flash_export import graph as g
from flash_export.bands import Band
from flash_export.canonical import Attention, Refused
from flash_export.patterns import PATTERNS
from flash_export.patterns.operator import Operator, attention_of, float_of
from flash_export.region import Region

DOMAIN, NAME = "acme", "TemperedAttention"


def read(anchor: ir.Node, region: Region) -> Attention:
    """softmax(Q.K^T / (temperature * sqrt(D)) + causal mask) . V, on [batch, seq, heads * D].

    Raises:
        Refused: ``heads`` is missing, or an attribute that this pattern does not know: it may change the numbers.
    """
    unknown = set(anchor.attributes) - {"heads", "temperature"}
    heads = g.int_attribute(anchor, "heads", 0)
    if unknown or not heads:
        raise Refused(
            "acme_attribute",
            f"the node has {heads} heads and the unknown attributes {sorted(unknown)}",
            anchor,
            "export with the attributes heads and temperature alone",
        )
    query, key, value = anchor.inputs
    assert query is not None and key is not None and value is not None  # noqa: PT018 - the schema has no optional input
    shape = region.shapes.shape(query)
    width = None if shape is None else shape[-1].static
    if width is None:
        raise Refused("acme_width", "the hidden size is not known", anchor, "run onnx's shape inference first")
    scale = 1.0 / (float_of(anchor, "temperature", 1.0) * math.sqrt(width // heads))
    causal = Band(None, 0, False, False)
    return attention_of(anchor, Operator(query, key, value, heads, heads, scale=scale, band=causal), region)


PATTERNS[DOMAIN, NAME] = read
