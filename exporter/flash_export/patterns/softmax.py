# SPDX-License-Identifier: Apache-2.0
"""Attention written out: a product, a Softmax, a second product, in whatever order of operands and layouts.

What ONNX Runtime's optimizer makes of such a graph (``FusedMatMul``, ``BiasSoftmax``) is read as what it stands for.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Attention, NotAttention, Refused
from flash_export.contrib_product import added_by, alpha_of
from flash_export.layout import Axes, Axis, Chain, fresh_axes, leaves
from flash_export.patterns.contrib_inputs import require_inputs
from flash_export.patterns.erased import refuse_erased
from flash_export.patterns.nearby import product_above
from flash_export.patterns.probabilities import axes_below, read_probabilities, refuse_second, zero
from flash_export.patterns.quantized import refuse_quantized
from flash_export.patterns.replaced import refuse_replaced
from flash_export.patterns.row_factors import with_row_factors
from flash_export.patterns.scores import Expression, Step, read_scores
from flash_export.patterns.spread import spread
from flash_export.region import Product, Region, follow_tail, multiply

BIAS_SOFTMAX = "BiasSoftmax"
"""ONNX Runtime's fusion of an Add and a Softmax; of its providers, CUDA has it and the CPU has not."""

_LARGEST_FACTOR, _ROUNDED = 1e30, 1e-4
"""What V is multiplied by where the second product has a factor: no larger, and rounded to V's type by no more."""

NEARBY = (
    "unknown_operator",
    "product_form",
    "probabilities_used",
    "probabilities_changed",
    "dropout_active",
    "quantized",
    "sink",
    "subgraph",
)
"""Reasons found before the product of Q and K is: without one within reach, the softmax is no attention."""


def read(anchor: ir.Node, region: Region) -> Attention:
    """The attention around a Softmax node.

    Raises:
        NotAttention: one of the two products is missing.
        Refused: both are there and something about them has no fused form.
    """
    if anchor.op_type == BIAS_SOFTMAX:
        require_inputs(anchor, region)
    source = anchor.inputs[0]
    assert source is not None
    try:
        down, second = read_probabilities(anchor, region)
        first, up = read_scores(source, region)
    except Refused as error:
        if error.reason.code in NEARBY and not product_above(source, region.owners):
            raise NotAttention("no product of two activations lies above the softmax") from error
        raise
    for product in (first, second):
        _refuse_several(product)
        refuse_quantized(product.inputs, product)
    return _assemble(anchor, first, up, down, second, region)


def _refuse_several(product: ir.Node) -> None:
    """Refuses an Einsum that multiplies more than two tensors."""
    if product.op_type == "Einsum" and len(product.inputs) != 2:
        raise Refused(
            "product_form",
            f"Einsum multiplies {len(product.inputs)} tensors at once",
            product,
            "multiply Q and K in one einsum, the probabilities and V in another, and by factors outside of them",
        )


def _added_inside(anchor: ir.Node, expression: Expression) -> None:
    """The bias that ONNX Runtime's BiasSoftmax adds itself; its two ways to broadcast are both NumPy's."""
    bias = g.input_of(anchor, 1) if anchor.op_type == BIAS_SOFTMAX else None
    if bias is not None:
        expression.refuse_after_sink(anchor)
        expression.terms.append(Added(bias, 1.0, expression.axes, anchor))


def _softmax_axis(anchor: ir.Node, axes: Axes, opset: int) -> Axis:
    """The atoms that the Softmax runs over.

    Raises:
        Refused: ``softmax_flattens`` for opset-11 semantics over more than the last axis; BiasSoftmax has these always.
    """
    opset = 1 if anchor.op_type == BIAS_SOFTMAX else opset
    axis = g.int_attribute(anchor, "axis", -1 if opset >= 13 else 1)
    if not -len(axes) <= axis < len(axes):
        text = f"Softmax over axis {axis} of scores with {len(axes)} axes"
        raise Refused("softmax_axis", text, anchor, "give the softmax an axis that its input has")
    axis += len(axes) if axis < 0 else 0
    if opset < 13 and axis != len(axes) - 1:
        raise Refused(
            "softmax_flattens",
            f"before opset 13 Softmax with axis {axis} of {len(axes)} runs over all axes from there on together",
            anchor,
            "convert the model to opset 13 or newer, or give the softmax its last axis",
        )
    return leaves(axes[axis])


def _assemble(
    anchor: ir.Node, first: ir.Node, up: list[Step], down: list[ir.Node], second: ir.Node, region: Region
) -> Attention:
    left = region.operand(first.inputs[0], first, scalars=True)  # type: ignore[arg-type]
    right = region.operand(first.inputs[1], first, scalars=True)  # type: ignore[arg-type]
    scores = multiply(first, left.last, right.last, region.shapes)
    expression = Expression(scores.axes)
    expression.multiply(alpha_of(first))
    inside = added_by(first)
    if inside is not None:
        expression.terms.append(Added(*inside, expression.axes, first))
    for one in up:
        expression.apply(one, region)
    if expression.inside_tanh:
        # A bare tanh is a cap of 1.
        expression.multiply(1.0)
    _added_inside(anchor, expression)
    zero(anchor, expression, down, region)
    refuse_erased(expression.erased)
    refuse_replaced(expression.terms)
    summed = _softmax_axis(anchor, expression.axes, region.opset)
    if any(leaves(axis) != summed for axis in expression.key_axes):
        raise _other_axis(anchor)
    transposed = _is_transposed(scores, summed, anchor)
    (batch, rows), *readings = _readings(scores, scores.right if transposed else scores.left, summed)
    query, key = (right, left) if transposed else (left, right)
    query = with_row_factors(expression, scores, first, query, int(transposed), region)
    axes = axes_below(expression, down, region)
    probabilities = down[-1].outputs[0] if down else anchor.outputs[0]
    at = 0 if second.inputs[0] is probabilities else 1
    refuse_second(second, probabilities)
    value = _with_alpha(region.operand(second.inputs[1 - at], second, scalars=False), second, region)  # type: ignore[arg-type]
    value, result = _times_value(second, axes, value, at, region)
    columns = leaves(summed)
    if leaves(result.contraction) != columns:
        raise Refused(
            "softmax_axis",
            "the softmax does not run over the axis that is multiplied with V",
            anchor,
            "attention normalises over the keys; this one normalises over something else and stays as it is",
        )
    query, key, value = spread(query, key, value, ((first, scores), (second, result)), region)
    return Attention(
        anchor=anchor,
        query=query,
        key=key,
        value=value,
        batch=leaves(batch),
        rows=leaves(rows),
        columns=columns,
        depth=leaves(scores.contraction),
        v_depth=leaves(a for axis in (result.right if at == 0 else result.left) for a in axis),
        scale=expression.scale,
        softcap=expression.softcap,
        terms=expression.terms,
        tails=follow_tail(second.outputs[0], result.axes, region.shapes),
        band=None,
        nodes=[first, *(s.node for s in up), anchor, *down, second],
        sinks=expression.sinks,
        readings=readings,
    )


def _times_value(second: ir.Node, axes: Axes, value: Chain, at: int, region: Region) -> tuple[Chain, Product]:
    """V and the axes of its product; V as it enters it where it repeats heads in another order than K does."""
    try:
        return value, multiply(second, *((axes, value.last) if at == 0 else (value.last, axes)), region.shapes)
    except Refused:
        shape = region.shapes.shape(value.values[-1])
        if not value.expanded or shape is None:
            raise
    whole = fresh_axes(shape)
    product = multiply(second, *((axes, whole) if at == 0 else (whole, axes)), region.shapes)
    return Chain([value.values[-1]], [], [whole], [], []), product


def _with_alpha(value: Chain, second: ir.Node, region: Region) -> Chain:
    """V times what the second product is multiplied by, written down as a draft; V itself for a factor of 1."""
    factor, dtype = alpha_of(second), region.shapes.dtype(value.values[-1])
    if factor == 1.0 or dtype is None:
        return value
    with np.errstate(over="ignore"):
        array = np.array(factor, dtype=dtype.numpy())
    if abs(factor) > _LARGEST_FACTOR or abs(float(array) - factor) > _ROUNDED * abs(factor):
        raise Refused(
            "attribute_range",
            f"the product with V is multiplied by {factor:g}, which V cannot be in {dtype}",
            second,
            "multiply by a standard Mul behind the product",
        )
    number = region.drafts.constant(array)
    return Chain([region.drafts.op("Mul", value.values[-1], number)], [], [value.last], [], [])


def _is_transposed(scores: Product, summed: Axis, anchor: ir.Node) -> bool:
    """Whether K is the left operand: the softmax runs over K's length, whichever side that is."""
    for axes, transposed in ((scores.right, False), (scores.left, True)):
        whole = [a for axis in axes for a in leaves(axis) if {id(x) for x in leaves(axis)} <= {id(x) for x in summed}]
        if {id(a) for a in whole} == {id(a) for a in summed}:
            return transposed
    raise _other_axis(anchor)


def _readings(scores: Product, own: Axes, summed: Axis) -> list[tuple[Axis, Axis]]:
    """The ways to tell the scores' outer axes from the query length, as (batch, rows), the likeliest first.

    A MatMul has one. In an Einsum several axes may belong to Q alone: its length, and heads that share K and V. Any of
    them may be taken for the length, the innermost of the scores' first, and all together too: an image's rows and
    columns are one.
    """
    choices = [*([axis] for axis in reversed(scores.axes) if any(axis is x for x in own)), own]
    result = []
    for chosen in choices:
        ids = {id(a) for axis in chosen for a in leaves(axis)}
        outer = [a for axis in scores.axes for a in leaves(axis) if a not in summed and id(a) not in ids]
        result.append((outer, [a for axis in chosen for a in leaves(axis)]))
    return result if len(own) > 1 else result[:1]


def _other_axis(anchor: ir.Node) -> Refused:
    return Refused(
        "softmax_axis",
        "the softmax does not run over the key length alone",
        anchor,
        "attention normalises over the keys; this one normalises over something else and stays as it is",
    )
