# SPDX-License-Identifier: Apache-2.0
"""From the Softmax up to the product of Q and K: every node on the way becomes part of a term, or the site is refused.

A new kind of term is one reader and one line in ``_READERS``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Hidden, NotAttention, Refused, Side, Term, name_of
from flash_export.dims import ONE
from flash_export.enlarging import refuse_enlarging
from flash_export.layout import Axes, Axis, is_float_cast, read_scalar_factor, step, trains
from flash_export.mask_terms import uniform
from flash_export.patterns.erased import differs_by_key, hidden_by
from flash_export.patterns.layout_texts import RENAME_LENGTHS, rearranged
from flash_export.patterns.lifted import BELOW_ALL, lifted
from flash_export.patterns.narrowed import narrowing, refuse_lost_fills
from flash_export.patterns.nearby import from_outside, of_the_scores
from flash_export.patterns.replaced import replaced
from flash_export.patterns.row_factors import row_factor
from flash_export.patterns.unread import unread
from flash_export.region import Region, is_product


@dataclasses.dataclass(slots=True)
class Step:
    """One node between the product and the Softmax; ``effect`` is applied when its input's axes are known."""

    node: ir.Node
    source: ir.Value
    effect: Callable[[Expression], None] | None = None


@dataclasses.dataclass(slots=True)
class Expression:
    """What has been read between the product and a point on the way to the Softmax."""

    axes: Axes
    scale: float = 1.0
    softcap: float = 0.0
    inside_tanh: bool = False
    terms: list[Term] = dataclasses.field(default_factory=list)
    row_factors: list[Side] = dataclasses.field(default_factory=list)
    erased: Side | None = None
    """A factor that differs from key to key; what is added right after it says whether the two are a mask."""
    sinks: Side | None = None
    key_axes: list[Axis] = dataclasses.field(default_factory=list)
    """Axes that a node took for those of the keys; the softmax must run over them."""
    shifted: ir.Node | None = None
    """Subtracts each row's own maximum: no softmax sees it, but a column beside the scores and a soft cap do."""
    narrow: ir.DataType | None = None
    """The type of a smaller range that the scores were cast to, and have."""

    def apply(self, one: Step, region: Region) -> None:
        """Goes past one node on the way.

        Raises:
            Refused: what it does is no part of attention here.
        """
        erased = self.erased
        if one.effect is not None:
            one.effect(self)
        if erased is not None and self.erased is erased:
            raise differs_by_key(erased.node)
        if self.narrow is not None:
            refuse_lost_fills(self.terms, self.narrow, one.node, region, cast=False)

    def multiply(self, factor: float) -> None:
        """Everything read so far is multiplied by ``factor``."""
        if self.inside_tanh:
            # cap * tanh(s * x): the kernel computes cap * tanh(scale * x / cap).
            self.softcap, self.scale, self.inside_tanh = factor, self.scale * factor, False
            return
        self.refuse_after_sink(None)
        if self.softcap:
            raise Refused("softcap_scaled", "the capped scores are scaled again", None, "fold the factor into the cap")
        self.scale *= factor
        for term in self.terms:
            if isinstance(term, Added):
                term.factor *= factor
            elif factor <= 0 or term.fill != -np.inf:
                raise Refused("mask_scaled", f"masked scores are multiplied by {factor:g}", term.node, "scale first")

    def refuse_after_sink(self, node: ir.Node | None) -> None:
        """A column beside the scores must come last: what follows would change it too."""
        if self.sinks is not None:
            raise Refused(
                "sink",
                "the scores are changed after a column was concatenated to them",
                node or self.sinks.node,
                "concatenate the sinks right before the softmax",
            )


def read_scores(value: ir.Value, region: Region) -> tuple[ir.Node, list[Step]]:
    """The product that makes ``value`` and the steps from it, in the order of computation.

    Raises:
        NotAttention: no product of two activations lies above.
        Refused: one does, and a node on the way is no part of a known term.
    """
    # A graph may read one value twice at every node: without a memory the paths would be 2 to the number of nodes.
    key = ("scores", value)
    if key not in region.proofs:
        try:
            region.proofs[key] = _read_scores(value, region)
        except (Refused, NotAttention) as error:
            region.proofs[key] = error
    found = region.proofs[key]
    if isinstance(found, Exception):
        raise found
    return cast("tuple[ir.Node, list[Step]]", found)


def _read_scores(value: ir.Value, region: Region) -> tuple[ir.Node, list[Step]]:
    node = value.producer()
    if node is None:
        raise from_outside(value, region.owners)
    if is_product(node):
        return _product(node, region)
    reader = _READERS.get(node.op_type) if g.is_op(node, node.op_type) else None
    if reader is None:
        raise unread(node)
    refusals: list[tuple[Refused | NotAttention, ir.Value]] = []
    for option in reader(node, region):
        try:
            product, steps = read_scores(option.source, region)
        except (Refused, NotAttention) as error:
            refusals.append((error, option.source))
            continue
        return product, [*steps, option]
    raise of_the_scores(node, refusals) or unread(node)


def _product(node: ir.Node, region: Region) -> tuple[ir.Node, list[Step]]:
    weights = [v for v in node.inputs if v is not None and _is_layer_weight(v, node, region)]
    if len(node.inputs) - len(weights) >= 2:
        return node, []
    others = [v for v in node.inputs if v is not None and v not in weights]
    try:
        for other in others:
            read_scores(other, region)
            raise Refused(
                "heads_mixed",
                f"the scores go through a second product, with the weights {weights[0].name}, before the softmax",
                node,
                "attention that mixes heads (talking heads) has no fused form; it stays in standard operators",
            )
    except NotAttention:
        pass
    raise NotAttention("the softmax is over a product with weights")


def _is_layer_weight(value: ir.Value, node: ir.Node, region: Region) -> bool:
    """Whether a constant operand is a linear layer's weight; learned queries stand at the left or have more axes."""
    if not g.is_weight(value):
        return False
    shape = region.shapes.shape(value)
    if g.is_op(node, "Einsum"):
        return True
    return value is node.inputs[1] and (shape is None or len(shape) <= 2)


def _layout(node: ir.Node, region: Region) -> list[Step]:
    source = node.inputs[0]
    if source is None or trains(node) or (node.op_type == "Cast" and not is_float_cast(node, region.shapes)):
        return []

    def effect(e: Expression) -> None:
        if not g.is_op(node, "Identity", "Dropout", "Cast"):
            e.refuse_after_sink(node)
        axes = step(node, e.axes, region.shapes)
        if axes is None:
            raise Refused(
                "scores_layout",
                f"{node.op_type} rearranges the scores {rearranged(node, region.shapes)}",
                node,
                RENAME_LENGTHS,
            )
        if node.op_type == "Cast":
            e.narrow = narrowing(node, region)
            if e.narrow is not None:
                refuse_lost_fills(e.terms, e.narrow, node, region, cast=True)
        e.axes = axes

    return [Step(node, source, effect)]


def _scaled(node: ir.Node, region: Region) -> list[Step]:
    factor = read_scalar_factor(node, region.shapes, region.number)
    if factor is not None:
        return [Step(node, factor[0], lambda e: e.multiply(factor[1]))]
    a, b = node.inputs[0], node.inputs[1]
    pairs = [(a, b)] if node.op_type == "Div" else [(a, b), (b, a)]
    return [Step(node, v, row_factor(node, by, region)) for v, by in pairs if v is not None and by is not None]


def _negated(node: ir.Node, region: Region) -> list[Step]:
    source = node.inputs[0]
    return [] if source is None else [Step(node, source, lambda e: e.multiply(-1.0))]


def _shift(node: ir.Node, scores: ir.Value | None, by: ir.Value | None, region: Region) -> list[Step] | None:
    """``scores - max(scores)`` over the keys, which no softmax sees; None for any other difference."""
    top = None if by is None else by.producer()
    if node.op_type != "Sub" or scores is None or not g.is_op(top, "ReduceMax"):
        return None
    assert top is not None
    axes, shape = g.axes_of(top), region.shapes.shape(scores)
    last = shape is not None and axes in ([-1], [len(shape) - 1])
    if top.inputs[0] is not scores or not last or not g.int_attribute(top, "keepdims", 1):
        return None

    def effect(e: Expression) -> None:
        if e.inside_tanh:
            raise Refused("softcap_form", "a maximum is subtracted inside the soft cap", node, "leave it")
        e.key_axes.append(e.axes[-1])
        e.shifted = node

    return [Step(node, scores, effect)]


def _added(node: ir.Node, region: Region) -> list[Step]:
    a, b = node.inputs[0], node.inputs[1]
    if a is b and a is not None and node.op_type == "Add":
        return [Step(node, a, lambda e: e.multiply(2.0))]
    shifted = _shift(node, a, b, region)
    if shifted is not None:
        return shifted
    options: list[Step] = []
    for scores, bias in ((a, b), (b, a)):
        if scores is None or bias is None:
            continue
        sign = -1.0 if node.op_type == "Sub" else 1.0

        def effect(e: Expression, bias: ir.Value = bias, sign: float = sign) -> None:
            e.refuse_after_sink(node)
            if e.inside_tanh:
                raise Refused("softcap_form", "a bias is added to tanh before the cap multiplies it", node, "leave it")
            if e.erased is not None:
                e.terms.append(hidden_by(e.erased, bias, sign, node, region))
                e.erased = None
                return
            e.terms.append(Added(bias, sign, e.axes, node))

        options.append(Step(node, scores, effect))
        if node.op_type == "Sub":
            return [*options, *_subtracted(node, a, b)]
    return options


def _subtracted(node: ir.Node, bias: ir.Value | None, scores: ir.Value | None) -> list[Step]:
    """``bias - scores``: the scores times -1, and the bias added."""
    if scores is None or bias is None:
        return []

    def effect(e: Expression) -> None:
        e.refuse_after_sink(node)
        if e.inside_tanh:
            raise Refused("softcap_form", "a tanh is subtracted before the cap multiplies it", node, "leave it")
        e.multiply(-1.0)
        e.terms.append(Added(bias, 1.0, e.axes, node))

    return [Step(node, scores, effect)]


def _where(node: ir.Node, region: Region) -> list[Step]:
    condition, yes, no = node.inputs[0], node.inputs[1], node.inputs[2]
    if condition is None or yes is None or no is None:
        return []
    options: list[Step] = []
    for scores, other, keep in ((yes, no, True), (no, yes, False)):

        def effect(e: Expression, other: ir.Value = other, keep: bool = keep) -> None:
            e.refuse_after_sink(node)
            fill = uniform(other, region.evaluator)
            if fill is None or e.inside_tanh:
                raise replaced(node, "what is not one known number" if fill is None else f"{fill:g} inside a soft cap")
            refuse_enlarging("fill", other, e.axes, node, region.shapes)
            e.terms.append(Hidden(condition, keep, fill, e.axes, node))

        options.append(Step(node, scores, effect))
    return options


def _tanh(node: ir.Node, region: Region) -> list[Step]:
    source = node.inputs[0]

    def effect(e: Expression) -> None:
        e.refuse_after_sink(node)
        if e.inside_tanh:
            raise Refused("softcap_form", "a tanh lies inside the tanh of the soft cap", node, "cap the scores once")
        if e.shifted is not None:
            raise Refused(
                "softcap_form",
                f"each row's maximum is subtracted inside the soft cap, at {name_of(e.shifted)}: that changes the cap",
                node,
                "cap the scaled scores themselves; the softmax subtracts the maximum by itself",
            )
        if e.terms or e.softcap:
            inside = "another soft cap" if e.softcap else "a mask or bias"
            raise Refused(
                "softcap_form",
                f"{inside} lies inside the tanh of the soft cap; FlashAttention caps once, before it masks",
                node,
                "apply one cap to the scaled scores first",
            )
        e.inside_tanh = True

    return [] if source is None else [Step(node, source, effect)]


def _sink(node: ir.Node, region: Region) -> list[Step]:
    """``Concat(scores, column)`` along the keys: attention sinks, one number a head."""
    if len(node.inputs) != 2:
        return []
    scores, column = node.inputs[0], node.inputs[1]
    shape = region.shapes.shape(column)
    axis = g.int_attribute(node, "axis", 0)
    if scores is None or column is None or shape is None or axis not in (-1, len(shape) - 1) or shape[-1] != ONE:
        return []

    def effect(e: Expression) -> None:
        e.refuse_after_sink(node)
        if e.inside_tanh:
            raise Refused("softcap_form", "a column is concatenated inside the soft cap", node, "leave it")
        if e.shifted is not None:
            raise Refused(
                "sink",
                f"each row's maximum is subtracted from the scores, at {name_of(e.shifted)}, before a column stands"
                " beside them: its numbers then weigh otherwise in each row",
                node,
                "concatenate the sinks to the scores themselves; the softmax subtracts the maximum by itself",
            )
        e.sinks = Side(column, e.axes, node)
        e.key_axes.append(e.axes[-1])

    return [Step(node, scores, effect)]


def _bounded(node: ir.Node, region: Region) -> list[Step]:
    """``Max(scores, lowest)``, the lowest number of the type."""
    options: list[Step] = []
    pairs = [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])] if len(node.inputs) == 2 else []
    for scores, bound in pairs:
        low = None if bound is None else uniform(bound, region.evaluator)
        if scores is not None and bound is not None and low is not None and low <= BELOW_ALL:

            def effect(e: Expression, bound: ir.Value = bound, low: float = low) -> None:
                e.refuse_after_sink(node)
                refuse_enlarging("bound", bound, e.axes, node, region.shapes)
                e.terms = lifted(e.terms, low, node, region.evaluator)

            options.append(Step(node, scores, effect))
    return options


_READERS: dict[str, Callable[[ir.Node, Region], list[Step]]] = {
    **dict.fromkeys(
        ("Identity", "Dropout", "Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"), _layout
    ),
    "Mul": _scaled,
    "Neg": _negated,
    "Div": _scaled,
    "Add": _added,
    "Sub": _added,
    "Where": _where,
    "Tanh": _tanh,
    "Concat": _sink,
    "Max": _bounded,
}
