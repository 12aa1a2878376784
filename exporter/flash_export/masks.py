# SPDX-License-Identifier: Apache-2.0
"""What a mask means: proven causal or window, dropped when it hides nothing, or kept as a tensor.

Nothing is recognised by its operators. A mask that depends on lengths alone is evaluated at several lengths (unequal
ones, 1, more than every constant in it) and compared with the pattern; one that also depends on data is split at its
And (or Or of hidden parts), and each part is treated by itself.

What may leave the tensor:

1. A part that hides nothing, always.
2. A part that hides with minus infinity, when it is causal or a window: hidden is hidden, in whatever order.
3. A part that hides with a finite fill, only when it leaves a visible key in every row and no other term can hide
   the rest: a row whose keys are all filled weighs them all alike, and an exact mask would not.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.bands import Band, Trial, match, trials_of
from flash_export.canonical import Added, Attention, Hidden, Refused, Term
from flash_export.dims import ONE
from flash_export.evaluate import Evaluator
from flash_export.layout import Axes, leaves, regroup, size_of
from flash_export.region import Region
from flash_export.shapes import Shapes

FORGETS = float(np.finfo(np.float16).min)
"""A key filled with this or less weighs nothing beside a visible one: exp(-65504 + any sane score) is 0."""

SWAMPS = -1e30
"""A score added to this or less is rounded away in fp32 and bf16, so that replacing a score equals adding the fill."""

SWAMPED = -1e38
"""A fill below ``SWAMPS`` that fp32 and bf16 hold."""


def uniform(value: ir.Value, evaluator: Evaluator) -> float | None:
    """The number that every element of ``value`` holds, whatever its lengths; None when there is no such number."""
    array = g.constant(value)
    if array is not None:
        return float(array.reshape(-1)[0]) if array.size and (array == array.reshape(-1)[0]).all() else None
    node = value.producer()
    if g.is_op(node, "ConstantOfShape"):
        assert node is not None
        attribute = node.attributes.get("value")
        return 0.0 if attribute is None else float(g.tensor_of(attribute).numpy().reshape(-1)[0])
    if node is not None and g.is_op(node, "Expand", "Reshape", "Identity", "Unsqueeze", "Squeeze", "Transpose", "Cast"):
        source = node.inputs[0]
        return None if source is None else uniform(source, evaluator)
    if node is None or not evaluator.evaluable(value) or evaluator.symbols(value):
        return None
    array = evaluator.evaluate(value, {})
    return float(array.reshape(-1)[0]) if array.size and (array == array.reshape(-1)[0]).all() else None


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """A boolean tensor and the value of its elements that means "visible"."""

    value: ir.Value
    keep: bool


@dataclasses.dataclass(slots=True)
class BiasPart:
    """One tensor that stays: ``factor * added``, or ``fill`` where any of ``literals`` is not at its ``keep``.

    The parts are summed in their order; one that ``overrides`` puts its fill in the place of the sum so far.
    """

    axes: Axes
    node: ir.Node
    added: ir.Value | None = None
    factor: float = 1.0
    literals: tuple[Literal, ...] = ()
    fill: float = 0.0
    overrides: bool = False


@dataclasses.dataclass(slots=True)
class MaskPlan:
    """How the terms of one attention are handed to the node: one band as attributes, the rest as one bias.

    ``by_length``: keys beyond a length of each batch entry are hidden as well.
    """

    band: Band | None = None
    by_length: bool = False
    parts: list[BiasPart] = dataclasses.field(default_factory=list)


def plan_masks(attention: Attention, region: Region) -> MaskPlan:
    """Decides for every term whether it is dropped, proven and becomes an attribute, or stays a tensor.

    Raises:
        Refused: ``mask_replaces_scores`` for a replaced score whose fill cannot be added instead.
    """
    prover = _Prover(attention, region)
    for term in attention.terms:
        _refuse_enlarging(term, region)
    plan = MaskPlan(attention.band, attention.lengths is not None)
    terms = [part for term in attention.terms for part in _flattened(term, prover)]
    for index, term in enumerate(terms):
        others = terms[:index] + terms[index + 1 :]
        prover.overridden = any(_overrides(later) for later in terms[index + 1 :])
        _place(term, others, plan, prover)
    return plan


def _refuse_enlarging(term: Term, region: Region) -> None:
    """A mask that is longer than the scores where they have length 1 would make the output larger."""
    value = term.condition if isinstance(term, Hidden) else term.value
    shape = region.shapes.shape(value)
    if shape is None:
        why = "its rank is not known"
    elif len(shape) > len(term.axes):
        why = f"it has rank {len(shape)}, the scores {len(term.axes)}"
    elif any(d.static != 1 and not leaves(a) for d, a in zip(reversed(shape), reversed(term.axes), strict=False)):
        why = f"it has shape {list(shape)} where the scores have length 1"
    else:
        return
    raise Refused(
        "bias_shape",
        f'the mask "{value.name}" does not broadcast into the scores: {why}',
        term.node,
        "give the mask the scores' rank with each dim 1 or full",
    )


def _place(term: Term, others: list[Term], plan: MaskPlan, prover: _Prover) -> None:
    hidden = term if isinstance(term, Hidden) else _as_hidden(term, prover.evaluator)
    if hidden is None:
        assert isinstance(term, Added)
        band = prover.added_band(term.value, term.factor) if prover.aligned(term) else None
        if band is not None and (band[0].hides_nothing or _may_hide(band[0], band[1], others, plan, prover)):
            plan.band = _joined(plan.band, band[0])
            return
        plan.parts.append(BiasPart(term.axes, term.node, added=term.value, factor=term.factor))
        return
    kept: list[Literal] = []
    for literal in conjuncts(Literal(hidden.condition, hidden.keep)):
        found = prover.literal_band(literal) if prover.aligned(term) else None
        if found is not None and found.hides_nothing:
            continue
        kept.append(literal)
    bands = [prover.literal_band(literal) if prover.aligned(term) else None for literal in kept]
    if hidden.fill == -np.inf:
        for literal, found in zip(tuple(kept), bands, strict=True):
            if found is not None and _may_hide(found, hidden.fill, others, plan, prover):
                plan.band = _joined(plan.band, found)
                kept.remove(literal)
    elif len(kept) == 1 and bands[0] is not None and _may_hide(bands[0], hidden.fill, others, plan, prover):
        plan.band = _joined(plan.band, bands[0])
        return
    if not kept:
        return
    if isinstance(term, Added) and len(kept) == len(conjuncts(Literal(hidden.condition, hidden.keep))):
        plan.parts.append(BiasPart(term.axes, term.node, added=term.value, factor=term.factor))
        return
    fill = hidden.fill
    if isinstance(term, Hidden) and fill > SWAMPS and all(_like(term, other) for other in others):
        # Whatever the one number is: a row with a visible key forgets it, and one without weighs all keys alike.
        fill = SWAMPED
    elif isinstance(term, Hidden) and fill > SWAMPS:
        raise Refused(
            "mask_replaces_scores",
            f"Where replaces masked scores by {fill:g} beside other masks or biases: rows whose keys are all hidden "
            "would weigh them otherwise",
            term.node,
            "write masked_fill(hidden, float('-inf')), or add the fill instead of replacing the score",
        )
    overrides = _overrides(term)
    plan.parts.append(BiasPart(hidden.axes, hidden.node, literals=tuple(kept), fill=fill, overrides=overrides))


def _like(term: Hidden, other: Term) -> bool:
    """Whether another term hides scores by the same number, or for good: then no row holds two kinds of hidden keys."""
    return isinstance(other, Hidden) and other.fill in (term.fill, -np.inf)


def _overrides(term: Term) -> bool:
    """Whether a term forgets what stands in its place: a finite fill by Where shows again what was hidden before."""
    return isinstance(term, Hidden) and term.fill != -np.inf


def _may_hide(band: Band, fill: float, others: list[Term], plan: MaskPlan, prover: _Prover) -> bool:
    """Whether hiding exactly may stand for the graph's mask, and whether the node has room for one more band."""
    if not _joinable(plan.band, band) or (plan.by_length and band.bottom_right):
        # With lengths the node counts from the last key there is, the mask from the last of the tensor.
        return False
    if fill == -np.inf:
        return not prover.overridden
    if fill > FORGETS:
        return False
    return not plan.by_length and band.full_rows and all(prover.harmless(term) for term in others)


def _joinable(first: Band | None, second: Band) -> bool:
    if first is None or first.hides_nothing or first == second:
        return True
    return first.bottom_right == second.bottom_right


def _joined(first: Band | None, second: Band) -> Band | None:
    if second.hides_nothing:
        return first
    if first is None or first.hides_nothing:
        return second
    return Band(
        _narrower(first.left, second.left),
        _narrower(first.right, second.right),
        first.bottom_right,
        first.full_rows and second.full_rows,
    )


def _narrower(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


MAX_NESTED_SUMS = 6
"""Sums within sums that are taken apart: a sum may read one mask twice, and so double its parts."""


def _flattened(term: Term, prover: _Prover, depth: int = MAX_NESTED_SUMS) -> list[Term]:
    """An added sum of masks as its summands, when that lets one of them leave the tensor."""
    if not isinstance(term, Added) or not depth:
        return [term]
    summands = _summands(term, prover.shapes)
    if any(prover.aligned(s) and prover.added_band(s.value, s.factor) is not None for s in summands):
        return [part for s in summands for part in _flattened(s, prover, depth - 1)]
    return [term]


def _summands(term: Added, shapes: Shapes) -> list[Added]:
    """The two summands of an added sum, with their axes above the layout operators between; none for another tensor."""
    value, axes = term.value, term.axes
    node = value.producer()
    while node is not None and g.is_op(node, "Identity", "Expand", "Reshape", "Unsqueeze", "Squeeze"):
        source = node.inputs[0]
        if source is None:
            return []
        if not g.is_op(node, "Identity", "Expand"):
            shape, above = shapes.shape(value), shapes.shape(source)
            if shape is None or above is None or len(shape) > len(axes):
                return []
            own = list(zip(shape, axes[len(axes) - len(shape) :], strict=True))
            if any(d != ONE and d != shapes.normal(size_of(axis)) for d, axis in own):
                return []
            regrouped = regroup([[] if d == ONE else axis for d, axis in own], above)
            if regrouped is None:
                return []
            axes = regrouped
        value, node = source, source.producer()
    if node is None or not g.is_op(node, "Add"):
        return []
    return [Added(v, term.factor, axes, node) for v in node.inputs if v is not None]


def _as_hidden(term: Added, evaluator: Evaluator) -> Hidden | None:
    """``Where(condition, 0, fill)`` added to the scores, as the mask that it is; None for any other tensor."""
    node = term.value.producer()
    while g.is_op(node, "Expand", "Identity"):
        assert node is not None
        assert node.inputs[0] is not None
        node = node.inputs[0].producer()
    if not g.is_op(node, "Where") or term.factor <= 0:
        return None
    assert node is not None
    condition, yes, no = node.inputs[0], node.inputs[1], node.inputs[2]
    if condition is None or yes is None or no is None:
        return None
    a, b = uniform(yes, evaluator), uniform(no, evaluator)
    if a == 0.0 and b is not None and b < 0.0:
        return Hidden(condition, True, b * term.factor, term.axes, node)
    if b == 0.0 and a is not None and a < 0.0:
        return Hidden(condition, False, a * term.factor, term.axes, node)
    return None


def conjuncts(literal: Literal, known: dict[Literal, list[Literal]] | None = None) -> list[Literal]:
    """The parts that must all be visible, each once: And of visible parts, Or of hidden ones, through Not."""
    known = {} if known is None else known
    if literal not in known:
        known[literal] = _conjuncts(literal, known)
    return known[literal]


def _conjuncts(literal: Literal, known: dict[Literal, list[Literal]]) -> list[Literal]:
    node = literal.value.producer()
    if g.is_op(node, "Not"):
        assert node is not None
        assert node.inputs[0] is not None
        return conjuncts(Literal(node.inputs[0], not literal.keep), known)
    if g.is_op(node, "Identity", "Expand") or (g.is_op(node, "Cast") and _is_bool_cast(node)):
        assert node is not None
        assert node.inputs[0] is not None
        inner = conjuncts(Literal(node.inputs[0], literal.keep), known)
        return inner if len(inner) > 1 or inner[0].value is not node.inputs[0] else [literal]
    if g.is_op(node, "And" if literal.keep else "Or"):
        assert node is not None
        parts = [part for v in node.inputs if v is not None for part in conjuncts(Literal(v, literal.keep), known)]
        return list(dict.fromkeys(parts))
    return [literal]


def _is_bool_cast(node: ir.Node | None) -> bool:
    source = None if node is None else node.inputs[0]
    return source is not None and (source.dtype == ir.DataType.BOOL or g.is_op(source.producer(), "Not", "And", "Or"))


class _Prover:
    """Compares evaluated masks with bands at many lengths."""

    def __init__(self, attention: Attention, region: Region) -> None:
        self.evaluator = region.evaluator
        self.shapes = region.shapes
        self._proofs = region.proofs
        self._rows = region.shapes.normal(size_of(attention.rows))
        self._columns = region.shapes.normal(size_of(attention.columns))
        self._axes = [leaves(attention.rows), leaves(attention.columns)]
        self.overridden = False
        """Whether a term behind the one being placed may show again what that one hides."""

    def aligned(self, term: Term) -> bool:
        """Whether the scores that the term stands beside end in queries and keys: a band is one of those two."""
        return [leaves(axis) for axis in term.axes[-2:]] == self._axes

    def literal_band(self, literal: Literal) -> Band | None:
        """The band that a boolean part is, proven; None when it depends on data or is no band."""
        key = (literal, self._rows, self._columns)
        if key not in self._proofs:
            self._proofs[key] = self._literal_band(literal)
        return cast("Band | None", self._proofs[key])

    def _literal_band(self, literal: Literal) -> Band | None:
        if not self.evaluator.evaluable(literal.value):
            return None
        trials = self._trials(literal.value)
        if trials is None:
            return None
        visible = [(a.astype(bool) == literal.keep, rows, columns) for a, rows, columns in trials]
        return match(visible)

    def added_band(self, value: ir.Value, factor: float) -> tuple[Band, float] | None:
        """The band and the fill of an added tensor that holds 0 and one fill, proven; None for any other."""
        key = (value, factor, self._rows, self._columns)
        if key not in self._proofs:
            self._proofs[key] = self._added_band(value, factor)
        return cast("tuple[Band, float] | None", self._proofs[key])

    def _added_band(self, value: ir.Value, factor: float) -> tuple[Band, float] | None:
        if not self.evaluator.evaluable(value):
            return None
        trials = self._trials(value)
        if trials is None:
            return None
        fills = {float(x) for a, _, _ in trials for x in np.unique(a) if x != 0}
        if len(fills) > 1 or any(np.isnan(f) or f * factor > 0 for f in fills):
            return None
        fill = fills.pop() * factor if fills else -np.inf
        if fill > FORGETS:
            return None
        band = match([(a == 0, rows, columns) for a, rows, columns in trials])
        return None if band is None else (band, fill)

    def harmless(self, term: Term) -> bool:
        """True for a term that cannot hide a row by itself: a band with full rows, or numbers of ordinary size."""
        if not self.aligned(term):
            return False
        if isinstance(term, Hidden):
            bands = [self.literal_band(part) for part in conjuncts(Literal(term.condition, term.keep))]
            return all(b is not None and b.hides_nothing for b in bands)
        if not self.evaluator.evaluable(term.value):
            return False
        trials = self._trials(term.value)
        return trials is not None and all(np.abs(a * term.factor).max(initial=0) < 1e4 for a, _, _ in trials)

    def _trials(self, value: ir.Value) -> list[Trial] | None:
        return trials_of(value, self._rows, self._columns, self.evaluator)
