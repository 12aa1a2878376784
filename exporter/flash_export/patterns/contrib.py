# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's own attention operators that are found and named, but not fused."""

from __future__ import annotations

import onnx_ir as ir

from flash_export.canonical import Attention, Refused
from flash_export.region import Region

DOMAIN = "com.microsoft"
OPERATORS = (
    "DecoderMaskedMultiHeadAttention",
    "PackedAttention",
    "PackedMultiHeadAttention",
    "SparseAttention",
)


def read(anchor: ir.Node, region: Region) -> Attention:
    """Never returns.

    Raises:
        Refused: ``contrib_operator``, always.
    """
    raise Refused(
        "contrib_operator",
        f"{anchor.op_type} of {DOMAIN} is ONNX Runtime's own operator",
        anchor,
        "export from PyTorch, or from the ONNX file before ONNX Runtime's optimizer",
    )
