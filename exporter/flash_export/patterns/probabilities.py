# SPDX-License-Identifier: Apache-2.0
"""From the Softmax down to the product with V: layout operators, a guard, masks repeated as zeros, a sink's end."""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import NotAttention, Refused
from flash_export.contrib_product import added_by
from flash_export.dims import ONE
from flash_export.layout import Axes, is_float_cast, step, trains
from flash_export.patterns import zeroed
from flash_export.patterns.branches import crossing, entering, has_branches
from flash_export.patterns.guards import guards_below, other_number
from flash_export.patterns.layout_texts import RENAME_LENGTHS, rearranged
from flash_export.patterns.nearby import product_below, summed_product, written_out
from flash_export.patterns.quantized import QUANTIZE_AFTERWARDS, is_quantization, quantized_factors
from flash_export.patterns.scores import Expression
from flash_export.region import Region, is_product, users

_MOST_ON_A_SUM = 6
"""Operators between a sum and the division by it: a number added, a lower bound, an axis put back."""

_BELOW = ("Identity", "Dropout", "Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze")


def read_probabilities(anchor: ir.Node, region: Region) -> tuple[list[ir.Node], ir.Node]:
    """The layout nodes from the Softmax down to the second product, and that product.

    A Slice among them may only drop the column of a sink, which ``axes_below`` sees to.

    Raises:
        NotAttention: there is no such product.
        Refused: somebody else reads the probabilities, or changes them.
    """
    value = anchor.outputs[0]
    path: list[ir.Node] = []
    while True:
        guards = guards_below(value, region)
        if guards:
            path += guards
            value = guards[-1].outputs[0]
            continue
        readers = users(value)
        if len(readers) != 1 or value.is_graph_output():
            raise _shared(value, readers, region)
        node = readers[0]
        if is_product(node) and node.graph is anchor.graph:
            return path, node
        if node.graph is not anchor.graph:
            raise _elsewhere(anchor, readers) or _changed(value, node)
        if zeroed.zeroing(node, value, region) is not None:
            path.append(node)
            value = node.outputs[0]
            continue
        layout = g.is_op(node, *_BELOW, "Slice")
        if not layout or trains(node) or node.inputs[0] is not value:
            raise _changed(value, node)
        path.append(node)
        value = node.outputs[0]


def _elsewhere(anchor: ir.Node, readers: list[ir.Node]) -> Refused | None:
    """Why an attention stays whose second product lies in a branch or body below the softmax."""
    inner = {n.graph for n in readers if n.graph is not anchor.graph and product_below(n)}
    owner = next((n for n in anchor.graph or () if has_branches(n) and inner & set(g.held(n))), None) if inner else None
    return None if owner is None else crossing("the product with V lies", owner)


def _entered(value: ir.Value) -> Refused | None:
    """Why an attention stays whose second product lies in a loop that is given ``value``."""
    for owner in users(value):
        inner = [new for new, old in entering([owner]).items() if old is value]
        if any(product_below(node) for new in inner for node in users(new)):
            return crossing("the product with V lies", owner)
    return None


def _shared(value: ir.Value, readers: list[ir.Node], region: Region) -> Exception:
    producer = value.producer()
    below = None if producer is None else _elsewhere(producer, readers)
    if below is not None:
        return below
    if value.is_graph_output() and any(product_below(owner) for owner in region.owners):
        return crossing("the softmax lies", region.owners[0])
    if not any(product_below(node) for node in readers):
        return _entered(value) or NotAttention("the softmax's output enters no product")
    other = other_number(value, region)
    if other is not None:
        return other
    if _normalized(value) is not None:
        return _renormalized(value.producer(), "the probabilities are")
    others = ", ".join(n.op_type for n in readers if not is_product(n))
    # A reader with a product below it is a layout operator on the way to V, or another layer.
    outputs = g.for_outputs([value], [n for n in readers if is_product(n) or product_below(n)])
    used = "are an output of the graph" if value.is_graph_output() else "are also read by another product"
    action = "attention whose probabilities are read twice has no fused form; it stays in standard operators"
    if value.is_graph_output() or outputs:
        action = "export the model without its attention weights (need_weights=False, output_attentions=False)"
    return Refused(
        "probabilities_used",
        f'the probabilities "{value.name}" {f"are also read by {others}{outputs}" if others else used}; '
        "FlashAttention never forms them",
        value.producer(),
        action,
    )


def _changed(value: ir.Value, node: ir.Node) -> Exception:
    if not product_below(node):
        return _entered(value) or NotAttention("the softmax's output enters no product")
    if summed_product(node):
        return written_out(node)
    if _normalized(node.outputs[0]) is not None:
        return _renormalized(node, f"{node.op_type} changes the probabilities, and the result is")
    if is_quantization(node) or quantized_factors(node) is not None:
        return Refused("quantized", f"{node.op_type} follows the softmax", node, QUANTIZE_AFTERWARDS)
    if trains(node):
        return Refused("dropout_active", "Dropout is in training mode", node, "export the model in eval() mode")
    action = "attention whose probabilities are changed has no fused form; it stays in standard operators"
    if g.is_op(node, "Pad"):  # chunks of a sliding window are multiplied with a wider piece of V each
        action = (
            "write a window that is computed in chunks as a mask of the whole [S, S] scores, and it is fused as one"
        )
    return Refused(
        "probabilities_changed",
        f"{node.op_type} changes the probabilities between the softmax and the product with V",
        node,
        action,
    )


def _normalized(value: ir.Value) -> ir.Node | None:
    """The Div of ``value`` by its own sum, which something small may be added to."""
    sums = [n for n in users(value) if g.is_op(n, "ReduceSum", "ReduceL1")]
    for node in users(value):
        if g.is_op(node, "Div") and node.inputs[0] is value and node.inputs[1] is not None:
            above = node.inputs[1].producer()
            for _ in range(_MOST_ON_A_SUM):
                if above is None or above in sums:
                    break
                above = next((v.producer() for v in above.inputs if v is not None and not g.is_weight(v)), None)
            if above in sums:
                return node
    return None


def _renormalized(node: ir.Node | None, what: str) -> Refused:
    return Refused(
        "probabilities_changed",
        f"{what} divided by the sum of each row once more",
        node,
        "where that hides keys, mask the scores with minus infinity instead, and let the softmax alone make each row's"
        " sum 1; anything else stays in standard operators",
    )


def zero(anchor: ir.Node, expression: Expression, down: list[ir.Node], region: Region) -> None:
    """Applies the masks that are repeated on the probabilities, as long as these have the scores' axes."""
    value, moved = anchor.outputs[0], False
    guards: list[ir.Node] = []
    for node in down:
        guards += guards_below(value, region)
        if node not in guards and zeroed.zeroing(node, value, region) is not None:
            if moved:
                raise _changed(value, node)
            zeroed.apply(node, value, expression, region)
        moved = moved or not g.is_op(node, "Where", "Identity", "Dropout", "Cast")
        value = node.outputs[0]


def refuse_second(second: ir.Node, probabilities: ir.Value) -> None:
    """Refuses a second product of which the probabilities are not one factor, and the result is not all."""
    text, action = "", "leave it"
    if second.inputs[0] is second.inputs[1]:
        text = "the probabilities are multiplied by themselves"
    elif probabilities not in second.inputs[:2]:
        text = f"{second.op_type} adds the probabilities to a product"
    elif added_by(second) is not None:
        text = f"{second.op_type} adds a tensor to the product with V"
        action = "add the tensor behind the product, by an Add of its own"
    if text:
        raise Refused("product_form", text, second, action)


def axes_below(expression: Expression, down: list[ir.Node], region: Region) -> Axes:
    """The axes of the probabilities where they enter the second product.

    Raises:
        Refused: ``probabilities_layout``, or ``sink`` for a column that is not dropped again.
    """
    axes, column = expression.axes, expression.sinks is not None
    for node in down:
        if g.is_op(node, "Where"):
            continue  # the guard
        if g.is_op(node, "Slice"):
            if not (column and _drops_the_last(node, len(axes), region)):
                raise _cut_off(node)
            column = False
            continue
        if column and not g.is_op(node, "Identity", "Dropout", "Cast"):
            raise _cut_off(node)
        following = step(node, axes, region.shapes)
        if following is None or (node.op_type == "Cast" and not is_float_cast(node, region.shapes)):
            raise Refused(
                "probabilities_layout",
                f"{node.op_type} rearranges the probabilities {rearranged(node, region.shapes)}",
                node,
                RENAME_LENGTHS,
            )
        axes = following
    if column:
        raise _cut_off(expression.sinks.node if expression.sinks else None)
    return axes


def _drops_the_last(node: ir.Node, rank: int, region: Region) -> bool:
    """True for a Slice of the last axis that leaves out its last element and nothing else."""
    bounds = [region.shapes.contents(v) for v in node.inputs[1:]]
    if len(bounds) < 3 or any(b is None or len(b) != 1 for b in bounds):
        return False
    start, stop, axis, step = ([b[0] for b in bounds if b is not None] + [ONE])[:4]
    length = region.shapes.shape(node.inputs[0])
    last = stop.static == -1 or (length is not None and stop == length[-1] - ONE)
    return start.static == 0 and last and axis.static in (-1, rank - 1) and step == ONE


def _cut_off(node: ir.Node | None) -> Refused:
    return Refused(
        "sink",
        "the probabilities are cut, or a column beside the scores is not dropped again",
        node,
        "a sink is one column that is dropped right after the softmax; this attention stays in standard operators",
    )
