# SPDX-License-Identifier: Apache-2.0
"""``com.microsoft.FusedMatMul``, into which ONNX Runtime's optimizer folds a transpose or a scale beside a MatMul."""

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


def alpha_of(node: ir.Node) -> float:
    """What the product is multiplied by; 1 for a standard operator."""
    attribute = node.attributes.get("alpha") if is_fused_product(node) else None
    return 1.0 if attribute is None else float(attribute.as_float())


def as_multiplied(node: ir.Node, axes: Sequence[T], side: str) -> list[T]:
    """The axes of operand ``A`` or ``B`` in the order in which MatMul would take them.

    ``transBatch`` means that the operand's first axis stands behind its batch axes; ``trans`` swaps the last two.
    """
    result = list(axes)
    if not is_fused_product(node) or len(result) < 2:
        return result
    if g.int_attribute(node, f"transBatch{side}", 0) and len(result) > 2:
        result = [*result[1:-1], result[0], result[-1]]
    if g.int_attribute(node, f"trans{side}", 0):
        result[-2:] = reversed(result[-2:])
    return result


def keeps_rows(node: ir.Node) -> bool:
    """Whether the first operand stands as MatMul would take it: batch axes, rows, head dim."""
    return as_multiplied(node, range(4), "A") == list(range(4))
