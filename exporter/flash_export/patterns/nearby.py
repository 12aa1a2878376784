# SPDX-License-Identifier: Apache-2.0
"""Whether a softmax that does not match stands between two products of activations, so that it is attention at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import NotAttention, Refused, name_of
from flash_export.patterns.branches import crossing, entering
from flash_export.patterns.quantized import is_quantization, quantized_factors
from flash_export.region import is_product, users

REACH = 24
"""Nodes looked at on each side; those that only round or move numbers make the way no longer."""

_LOOKED_AT = 512
"""Nodes of any kind looked at on each side."""

_LAYERS = (
    *("LayerNormalization", "BatchNormalization", "Conv", "Gemm", "Shape"),
    *("QLinearConv", "ConvInteger", "QGemm"),
)
"""What lies above one of these makes no scores."""

_FIRST, _UPDATED = (0,), (0, 2)
_MOVING = {
    **dict.fromkeys(("Cast", "Identity", "Transpose", "Flatten", "Split", "Trilu", "ReverseSequence"), _FIRST),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze", "Expand", "Tile", "Slice", "Pad"), _FIRST),
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), _FIRST),
    **dict.fromkeys(("ScatterElements", "ScatterND"), _UPDATED),
    **dict.fromkeys(("ConstantOfShape", "Range"), ()),
}
"""Operators that only move numbers, or make some of lengths -> the operands that these come from.

The others are places and lengths. Chunks of a sliding window are cut out and put together by tens of these.
"""


def product_below(node: ir.Node) -> bool:
    """Whether a product of two activations lies not far below ``node``, or is it."""
    queue, seen, spent = [node], {node}, 0
    while queue and spent < REACH and len(seen) < _LOOKED_AT:
        current = queue.pop(0)
        spent += not _moves(current)
        factors = _factors(current)
        if factors is not None:
            return _of_activations(factors)
        following = dict.fromkeys(n for v in current.outputs for n in users(v) if n not in seen and _carries(n, v))
        seen.update(following)
        queue.extend(following)
    return False


def product_above(value: ir.Value, owners: Sequence[ir.Node] = ()) -> bool:
    """Whether a product of two activations lies not far above ``value``, perhaps outside of the loops ``owners``."""
    outer = entering(owners)
    queue, seen, spent = [value], {value}, 0
    while queue and spent < REACH and len(seen) < _LOOKED_AT:
        current = queue.pop(0)
        node = current.producer()
        if node is None:
            spent += 1
            above = [outer[current]] if current in outer else []
        else:
            spent += not _moves(node)
            factors = _factors(node)
            if factors is not None and _of_activations(factors):
                return True
            passes = factors is None and node.op_type not in _LAYERS
            above = [v for v in _sources(node) if v.producer() is not None or v in outer] if passes else []
        above = [v for v in dict.fromkeys(above) if v not in seen]
        seen.update(above)
        queue = above + queue if node is not None and is_quantization(node) else queue + above
    return False


def _moves(node: ir.Node) -> bool:
    return is_quantization(node) or g.is_op(node, *_MOVING)


def _sources(node: ir.Node) -> Iterable[ir.Value]:
    """The operands that the numbers of ``node`` are made of."""
    if is_quantization(node):
        return [v for v in node.inputs[:1] if v is not None]
    if g.is_op(node, *_MOVING):
        return [v for i in _MOVING[node.op_type] if (v := g.input_of(node, i)) is not None]
    return g.all_inputs(node)


def _carries(node: ir.Node, value: ir.Value) -> bool:
    """Whether ``node`` hands on numbers of ``value``, where another would read places or lengths in it."""
    return any(v is value for v in _sources(node))


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
