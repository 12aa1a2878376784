# SPDX-License-Identifier: Apache-2.0
"""What every pattern needs of the graph around its anchor: shapes, types, numbers, products, tails."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from flash_export import einsum
from flash_export import graph as g
from flash_export.canonical import Refused, Tail
from flash_export.contrib_product import as_multiplied, is_fused_product, is_gemm_product
from flash_export.drafts import Drafts
from flash_export.evaluate import Evaluator, NotEvaluable
from flash_export.layout import Axes, Axis, Chain, follow, is_float_cast, leaves, step, unify
from flash_export.shapes import Shapes


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The graph that an anchor lies in, with what is known of it.

    ``drafts`` takes the nodes that a reader writes down; ``proofs`` keeps what ``masks`` has proven; ``owners`` are the
    nodes whose branch or body the graph is, the innermost first.
    """

    shapes: Shapes
    evaluator: Evaluator
    opset: int
    drafts: Drafts
    proofs: dict[object, object] = dataclasses.field(default_factory=dict)
    owners: tuple[ir.Node, ...] = ()

    def number(self, value: ir.Value | None) -> float | None:
        """The one number that ``value`` holds: a constant, or computed from static lengths. None otherwise."""
        if value is None:
            return None
        known = g.scalar(value)
        if known is not None:
            return known
        shape = self.shapes.shape(value)
        if shape is None or any(d.static != 1 for d in shape) or value.is_graph_input():
            return None
        try:
            if self.evaluator.symbols(value):
                return None
            return float(self.evaluator.evaluate(value, {}).reshape(()))
        except (NotEvaluable, ValueError):
            return None

    def operand(self, value: ir.Value, node: ir.Node, *, scalars: bool) -> Chain:
        """Follows an operand of a product up to its source.

        Raises:
            Refused: ``rank_unknown``.
        """
        chain = follow(value, self.shapes, scalar=self.number if scalars else None)
        if chain is None:
            raise Refused(
                "rank_unknown",
                f'the rank of "{value.name}" is not known',
                node,
                "run shape inference on the model first, or export it with static ranks",
            )
        return chain


@dataclasses.dataclass(slots=True)
class Product:
    """The axes of a product of two tensors: its own, those from ``left`` or ``right`` only, and the one summed over."""

    axes: Axes
    left: Axes
    right: Axes
    contraction: Axis


def is_product(node: ir.Node | None) -> bool:
    """True for MatMul, FusedMatMul, a Gemm of activations and an Einsum; ``multiply`` reads those of two operands."""
    if g.is_op(node, "MatMul") or is_fused_product(node) or is_gemm_product(node):
        return True
    return g.is_op(node, "Einsum") and node is not None and len(node.inputs) >= 2


def multiply(node: ir.Node, left: Axes, right: Axes, shapes: Shapes) -> Product:
    """The product's axes with the operands' atoms unified; a factor or summand inside the node is the caller's.

    Raises:
        Refused: ``product_form`` when the operands' axes cannot be matched.
    """
    if node.op_type == "Einsum":
        result = _einsum(node, left, right, shapes)
    else:
        result = _matmul(as_multiplied(node, left, "A"), as_multiplied(node, right, "B"), shapes)
    if result is None:
        raise _unreadable(node)
    return result


def _unreadable(node: ir.Node) -> Refused:
    if node.op_type != "Einsum":
        what, action = f"of {node.op_type}", "export with fixed sizes, by which axes of one length are told"
    else:
        equation = node.attributes["equation"].as_string() if "equation" in node.attributes else ""
        what = f'of Einsum "{equation}"'
        action = "write it as torch.matmul, or as an einsum in which each axis that is summed over is in both operands"
    return Refused("product_form", f"the axes of the two operands {what} cannot be followed", node, action)


def _matmul(left: Axes, right: Axes, shapes: Shapes) -> Product | None:
    if len(left) < 2 or len(right) < 2 or not unify(left[-1], right[-2], shapes):
        return None
    batch: Axes = []
    outer_left, outer_right = left[:-2], right[:-2]
    for i in range(max(len(outer_left), len(outer_right)), 0, -1):
        a = leaves(outer_left[-i]) if i <= len(outer_left) else []
        b = leaves(outer_right[-i]) if i <= len(outer_right) else []
        if a and b and not unify(a, b, shapes):
            return None
        batch.append(a or b)
    return Product([*batch, left[-2], right[-1]], [left[-2]], [right[-1]], leaves(left[-1]))


def _einsum(node: ir.Node, left: Axes, right: Axes, shapes: Shapes) -> Product | None:
    letters = einsum.letters(node, [len(left), len(right)])
    if letters is None:
        return None
    (a, b), out = letters
    by_letter: dict[str, Axis] = dict(zip(a, left, strict=True))
    for name, axis in zip(b, right, strict=True):
        other = by_letter.get(name, [])
        if leaves(other) and leaves(axis) and not unify(other, axis, shapes):
            return None
        by_letter[name] = other if leaves(other) else axis
    summed = [n for n in a if n in b and n not in out]
    only_left, only_right = [n for n in a if n not in b], [n for n in b if n not in a]
    if not summed or not set(only_left + only_right) <= set(out):
        return None
    return Product(
        [by_letter[n] for n in out],
        [by_letter[n] for n in only_left],
        [by_letter[n] for n in only_right],
        [x for n in summed for x in leaves(by_letter[n])],
    )


def users(value: ir.Value) -> list[ir.Node]:
    """The nodes that read ``value``'s data; Shape and Size read only its lengths and are left out."""
    return [n for n in dict.fromkeys(use.node for use in value.uses()) if not g.is_op(n, "Shape", "Size")]


def follow_tail(value: ir.Value, axes: Axes, shapes: Shapes) -> list[Tail]:
    """The layout operators below the product as far as each is the only reader: where the node may end."""
    tails = [Tail(value, axes)]
    while not value.is_graph_output():
        readers = users(value)
        if len(readers) != 1 or readers[0].inputs[0] is not value or readers[0].graph is not value.producer().graph:  # type: ignore
            break
        node = readers[0]
        layout = g.is_op(node, "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
        following = step(node, axes, shapes) if layout or is_float_cast(node, shapes) else None
        if following is None:
            break
        value, axes = node.outputs[0], following
        tails.append(Tail(value, axes))
    return tails
