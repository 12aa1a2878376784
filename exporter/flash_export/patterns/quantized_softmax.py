# SPDX-License-Identifier: Apache-2.0
"""A softmax of integers between two products, as ONNX Runtime's QOperator format has it: refused."""

from __future__ import annotations

import onnx_ir as ir

from flash_export.canonical import Attention, NotAttention, Refused
from flash_export.patterns.nearby import product_above, product_below
from flash_export.patterns.quantized import QUANTIZE_AFTERWARDS
from flash_export.region import users

OPERATOR = "QLinearSoftmax"


def read(anchor: ir.Node, region: object) -> Attention:
    """Refuses a ``QLinearSoftmax`` that makes the probabilities of attention.

    Raises:
        Refused: ``quantized``.
        NotAttention: it stands between no products of activations, as that of a classifier.
    """
    source = anchor.inputs[0]
    weighs = any(product_below(node) for node in users(anchor.outputs[0]))
    if source is None or not weighs or not product_above(source):
        raise NotAttention("the quantized softmax stands between no two products of activations")
    raise Refused(
        "quantized",
        f"{OPERATOR} of ONNX Runtime computes the softmax between the products with quantized numbers",
        anchor,
        QUANTIZE_AFTERWARDS,
    )
