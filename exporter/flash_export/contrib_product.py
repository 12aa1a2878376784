# SPDX-License-Identifier: Apache-2.0
"""Products with transposes and a factor of their own.

``com.microsoft.FusedMatMul``, into which ONNX Runtime's optimizer folds what stands beside a MatMul, and a ``Gemm`` of
two activations, as PyTorch writes ``torch.mm`` and ``torch.addmm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import onnx_ir as ir

from flash_export import graph as g

CONTRIB_DOMAIN = "com.microsoft"
_NAMES = ("FusedMatMul", "TransposeMatMul")

T = TypeVar("T")


def is_fused_product(node: ir.Node | None) -> bool:
    """True for FusedMatMul and for its older name."""
    return node is not None and node.domain == CONTRIB_DOMAIN and node.op_type in _NAMES and len(node.inputs) == 2


def is_gemm_product(node: ir.Node | None) -> bool:
    """True for a Gemm neither of whose factors is a weight: with one it is a linear layer."""
    if node is None or not g.is_op(node, "Gemm"):
        return False
    return not any(value is None or g.is_weight(value) for value in node.inputs[:2])


def added_by(node: ir.Node) -> tuple[ir.Value, float] | None:
    """What a Gemm adds to its product, and times which factor; None where it adds nothing."""
    value = g.input_of(node, 2) if g.is_op(node, "Gemm") else None
    attribute = node.attributes.get("beta")
    beta = 1.0 if attribute is None else float(attribute.as_float())
    return None if value is None or beta == 0.0 or g.scalar(value) == 0.0 else (value, beta)


def alpha_of(node: ir.Node) -> float:
    """What the product is multiplied by; 1 for a MatMul."""
    attribute = node.attributes.get("alpha") if is_fused_product(node) or is_gemm_product(node) else None
    return 1.0 if attribute is None else float(attribute.as_float())


def as_multiplied(node: ir.Node, axes: Sequence[T], side: str) -> list[T]:
    """The axes of operand ``A`` or ``B`` in the order in which MatMul would take them.

    ``transBatch`` means that the operand's first axis stands behind its batch axes; ``trans`` swaps the last two.
    """
    result = list(axes)
    if not (is_fused_product(node) or is_gemm_product(node)) or len(result) < 2:
        return result
    if g.int_attribute(node, f"transBatch{side}", 0) and len(result) > 2:
        result = [*result[1:-1], result[0], result[-1]]
    if g.int_attribute(node, f"trans{side}", 0):
        result[-2:] = reversed(result[-2:])
    return result


def keeps_rows(node: ir.Node) -> bool:
    """Whether the first operand stands as MatMul would take it: batch axes, rows, head dim."""
    return as_multiplied(node, range(4), "A") == list(range(4))
