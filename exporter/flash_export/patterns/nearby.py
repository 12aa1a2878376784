# SPDX-License-Identifier: Apache-2.0
"""Whether a softmax that does not match stands between two products of activations, so that it is attention at all."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import NotAttention, Refused, name_of
from flash_export.patterns.branches import crossing, entering
from flash_export.patterns.quantized import is_quantization, quantized_factors
from flash_export.region import is_product, users

REACH = 24
"""Nodes looked at on each side."""

_LAYERS = (
    *("LayerNormalization", "BatchNormalization", "Conv", "Gemm", "Shape"),
    *("QLinearConv", "ConvInteger", "QGemm"),
)
"""What lies above one of these makes no scores."""


def product_below(node: ir.Node) -> bool:
    """Whether a product of two activations lies not far below ``node``, or is it."""
    queue, seen, rounding = [node], {node}, 0
    while queue and len(seen) - rounding < REACH:
        current = queue.pop(0)
        rounding += is_quantization(current)
        factors = _factors(current)
        if factors is not None:
            return _of_activations(factors)
        following = [n for v in current.outputs for n in users(v) if n not in seen]
        seen.update(following)
        queue.extend(following)
    return False


def product_above(value: ir.Value, owners: Sequence[ir.Node] = ()) -> bool:
    """Whether a product of two activations lies not far above ``value``, perhaps outside of the loops ``owners``."""
    outer = entering(owners)
    queue: list[ir.Value] = [value]
    seen = 0
    while queue and seen < REACH:
        seen += 1
        current = queue.pop(0)
        node = current.producer()
        if node is None:
            queue += [outer[current]] if current in outer else []
            continue
        factors = _factors(node)
        if factors is not None:
            if _of_activations(factors):
                return True
            continue
        if is_quantization(node):
            seen -= 1  # a quantizer may round every tensor on the way, which makes the way no longer
            queue[:0] = [v for v in node.inputs[:1] if v is not None]
        elif node.op_type not in _LAYERS:
            queue.extend(v for v in g.all_inputs(node) if v.producer() is not None or v in outer)
    return False


def of_the_scores(
    node: ir.Node, refusals: Sequence[tuple[Refused | NotAttention, ir.Value]]
) -> Refused | NotAttention | None:
    """Of what was said of the operands of ``node``, that of the one that comes from a product.

    The scores do; a fill, a bound or a factor beside them does not, and is none of the reasons why they stay. None
    where the scores are an operand of which nothing was said: a divisor, or the condition of a Where.
    """
    refused = [(error, source) for error, source in refusals if isinstance(error, Refused)]
    if len(refused) > 1:
        refused = [(error, source) for error, source in refused if product_above(source)] or refused
    asked = [source for _, source in refusals]
    if not refused and any(product_above(v) for v in node.inputs if v is not None and v not in asked):
        return None
    return next((error for error, _ in refused or refusals), None)


def from_outside(value: ir.Value, owners: Sequence[ir.Node]) -> Refused | NotAttention:
    """What is said of scores that no node of the graph makes, but perhaps one around the loops ``owners``."""
    if value in entering(owners) and product_above(value, owners):
        return crossing("the softmax and the product with V lie", owners[0])
    return NotAttention("the scores are an input")


def _factors(node: ir.Node) -> Sequence[ir.Value | None] | None:
    """What a product multiplies, of numbers or of integers that stand for them; None for other nodes."""
    if summed_product(node):
        return node.inputs if g.is_op(node, "Mul") else _multiplied(node).inputs  # type: ignore[union-attr]
    return node.inputs if is_product(node) else quantized_factors(node)


def summed_product(node: ir.Node) -> bool:
    """Whether ``node`` is one of a Mul of two tensors and the ReduceSum of what it makes: a product written out.

    Nobody but its sum reads what a product adds up; who is divided by the sum is no product.
    """
    if g.is_op(node, "Mul"):
        summed = [g.is_op(n, "ReduceSum") for n in users(node.outputs[0])]
        return node.inputs[0] is not node.inputs[1] and summed == [True]
    above = _multiplied(node)
    return above is not None and above.inputs[0] is not above.inputs[1]


def _multiplied(node: ir.Node) -> ir.Node | None:
    """The Mul whose result a ReduceSum adds up."""
    above = node.inputs[0].producer() if g.is_op(node, "ReduceSum") and node.inputs[0] is not None else None
    return above if g.is_op(above, "Mul") and len(users(above.outputs[0])) == 1 else None  # type: ignore[union-attr]


def written_out(node: ir.Node) -> Refused:
    """Why a product that is written out is no part of an attention that can be fused."""
    return Refused(
        "product_form",
        f"a product of the attention is written out, as Mul and ReduceSum, at {name_of(node)}",
        node,
        "write torch.matmul or torch.einsum, or call scaled_dot_product_attention, and export the model again",
    )


def _of_activations(factors: Sequence[ir.Value | None]) -> bool:
    """Whether two factors are no weights; an Einsum may have a third."""
    return sum(v is not None and not g.is_weight(v) for v in factors) >= 2
