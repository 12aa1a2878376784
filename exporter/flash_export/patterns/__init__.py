# SPDX-License-Identifier: Apache-2.0
"""One file a way in which attention appears. A new way: its file, its test, and one line here."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from flash_export.canonical import Attention
from flash_export.patterns import (
    contrib,
    contrib_group_query,
    contrib_multihead,
    contrib_packed_weights,
    quantized_softmax,
    softmax,
    standard_attention,
    written_softmax,
)
from flash_export.region import Region

PATTERNS: dict[tuple[str, str], Callable[[ir.Node, Region], Attention]] = {
    ("", "Softmax"): softmax.read,
    ("", "Attention"): standard_attention.read,
    (contrib.DOMAIN, "Attention"): contrib_packed_weights.read,
    (contrib.DOMAIN, softmax.BIAS_SOFTMAX): softmax.read,
    (contrib.DOMAIN, quantized_softmax.OPERATOR): quantized_softmax.read,
    (contrib.DOMAIN, "GroupQueryAttention"): contrib_group_query.read,
    (contrib.DOMAIN, "MultiHeadAttention"): contrib_multihead.read,
    **{(contrib.DOMAIN, operator): contrib.read for operator in contrib.OPERATORS},
}
"""Domain and operator of an anchor -> its reader: the canonical form, or Refused, or NotAttention."""

WRITTEN_OUT = {("", operator): written_softmax.read for operator in ("Exp", "LogSoftmax", "Pow", "ReduceLogSumExp")}
"""The same of operators that seldom are an anchor, or NoAnchor. A function with one is not inlined for its sake."""
