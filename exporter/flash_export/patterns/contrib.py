# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's own attention operators that are found and named, but not fused."""

from __future__ import annotations

import onnx_ir as ir

from flash_export.canonical import Attention, Refused
from flash_export.patterns.operator import SEPARATE
from flash_export.patterns.quantized import QUANTIZE_AFTERWARDS
from flash_export.region import Region

DOMAIN = "com.microsoft"
_BEFORE = "export from PyTorch, or from the ONNX file before ONNX Runtime's optimizer"
_QUANTIZED = ("quantized", "computes with quantized numbers", QUANTIZE_AFTERWARDS)
_SPARSE = ("contrib_operator", "skips keys by a pattern of its own", "leave it in ONNX Runtime's operators")
_PACKED = ("contrib_operator", "holds its sequences end to end, without a batch axis", _BEFORE)
_IN_PLACE = ("cache_in_place", "writes into a cache that it is given", SEPARATE)
_PAGED = ("cache_in_place", "reads its cache through a table of blocks", SEPARATE)
_WHY = {
    "DecoderAttention": ("contrib_operator", "chooses between its inputs at run time", _BEFORE),
    "DecoderMaskedMultiHeadAttention": _IN_PLACE,
    "DecoderMaskedSelfAttention": _IN_PLACE,
    "DynamicSparseAttention": _SPARSE,
    "LongformerAttention": _SPARSE,
    "PackedAttention": _PACKED,
    "PackedMultiHeadAttention": _PACKED,
    "PagedAttention": _PAGED,
    "QAttention": _QUANTIZED,
    "QOrderedAttention": _QUANTIZED,
    "QOrderedLongformerAttention": _QUANTIZED,
    "SparseAttention": _SPARSE,
    "SparsePagedAttention": _PAGED,
}
OPERATORS = tuple(_WHY)


def read(anchor: ir.Node, region: Region) -> Attention:
    """Never returns.

    Raises:
        Refused: always, with the operator's own reason.
    """
    code, what, action = _WHY[anchor.op_type]
    raise Refused(code, f"{anchor.op_type} of {DOMAIN}, ONNX Runtime's own operator, {what}", anchor, action)
