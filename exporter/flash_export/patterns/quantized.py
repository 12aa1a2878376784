# SPDX-License-Identifier: Apache-2.0
"""Attention whose products are quantized: it is refused, as FlashAttention multiplies in floating point alone.

Two forms of file say so: pairs of QuantizeLinear and DequantizeLinear around a MatMul, and products of integers
themselves (``QLinearMatMul``, ``MatMulInteger``), of which none is read, only found.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Refused, name_of
from flash_export.layout import LAYOUT_OPS

QUANTIZE_AFTERWARDS = (
    "give flash-export the model from before quantization, and quantize the file that it writes: ONNX Runtime's "
    "quantizer leaves its node in floating point"
)
"""What to do about quantized attention; a test follows it."""

_SELECTING = ("Split", "Slice", "Gather", "Cast")

_PRODUCTS = {
    "QLinearMatMul": (0, 3),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "DynamicQuantizeMatMul": (0, 1),
}
"""Products of integers -> which inputs are the factors."""

_DOMAINS = ("", "ai.onnx", "com.microsoft")
"""ONNX Runtime's quantizer writes the types that the standard did not have (16 and 4 bits) in its own domain."""


def is_quantization(node: ir.Node | None, *names: str) -> bool:
    """True for what quantizes and dequantizes (or those of ``names``), the standard's and ONNX Runtime's."""
    names = names or ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
    return node is not None and node.domain in _DOMAINS and node.op_type in names


def quantized_factors(node: ir.Node | None) -> tuple[ir.Value | None, ...] | None:
    """The two factors of a product of integers, each with scale and zero point left out; None for other nodes."""
    if node is None or node.domain not in _DOMAINS or node.op_type not in _PRODUCTS:
        return None
    return tuple(node.inputs[i] if i < len(node.inputs) else None for i in _PRODUCTS[node.op_type])


def in_scores(node: ir.Node) -> ir.Node | None:
    """The node that quantizes the scores, if ``node`` or the one that it takes numbers from does."""
    above = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    cast = above if node.op_type == "Cast" else None  # MatMulInteger gives integers, which are cast and scaled
    found = [n for n in (node, cast) if is_quantization(n) or quantized_factors(n) is not None]
    return found[0] if found else node if node.op_type.startswith("QLinear") else None


def refuse_quantized(operands: Iterable[ir.Value | None], product: ir.Node) -> None:
    """Refuses operands of ``product`` that are dequantized right before it, whatever layout operators lie between.

    Around a MatMul this is how a file says that it multiplies 8-bit numbers: a runtime that computes so would compute
    in floating point once the product is inside the node. A projection with dequantized weights is no such thing: its
    own MatMul lies between.

    Raises:
        Refused: ``quantized``.
    """
    for operand in operands:
        node = _source(operand)
        if is_quantization(node, "DequantizeLinear"):
            raise Refused(
                "quantized",
                f"an operand of {name_of(product)} is dequantized by {name_of(node)}: the product is computed with "
                "quantized numbers, which FlashAttention does not do",
                node,
                QUANTIZE_AFTERWARDS,
            )


def _source(value: ir.Value | None) -> ir.Node | None:
    """The node that made the numbers of ``value``, above all operators that only move or select them."""
    node = None if value is None else value.producer()
    while g.is_op(node, *LAYOUT_OPS, *_SELECTING):
        assert node is not None
        above = node.inputs[0]
        node = None if above is None else above.producer()
    return node
