# SPDX-License-Identifier: Apache-2.0
"""Whether a softmax that does not match stands between two products of activations, so that it is attention at all."""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.patterns.quantized import is_quantization
from flash_export.region import is_product, users

REACH = 24
"""Nodes looked at on each side."""


def product_below(node: ir.Node) -> bool:
    """Whether a product of two activations lies not far below ``node``, or is it."""
    queue, seen, rounding = [node], {node}, 0
    while queue and len(seen) - rounding < REACH:
        current = queue.pop(0)
        rounding += is_quantization(current)
        if is_product(current):
            return _of_activations(current)
        following = [n for v in current.outputs for n in users(v) if n not in seen]
        seen.update(following)
        queue.extend(following)
    return False


def product_above(value: ir.Value) -> bool:
    """Whether a product of two activations lies not far above ``value``."""
    queue: list[ir.Value] = [value]
    seen = 0
    while queue and seen < REACH:
        seen += 1
        node = queue.pop(0).producer()
        if node is None:
            continue
        if is_product(node):
            if _of_activations(node):
                return True
            continue
        if is_quantization(node):
            seen -= 1  # a quantizer may round every tensor on the way, which makes the way no longer
            queue[:0] = [v for v in node.inputs[:1] if v is not None]
        elif not g.is_op(node, "LayerNormalization", "BatchNormalization", "Conv", "Gemm", "Shape"):
            queue.extend(v for v in node.inputs if v is not None)
    return False


def _of_activations(product: ir.Node) -> bool:
    """Whether two factors are no weights; an Einsum may have a third."""
    return sum(v is not None and not g.is_weight(v) for v in product.inputs) >= 2
