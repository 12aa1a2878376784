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

import numpy as np
import onnx_ir as ir

from flash_export.bands import Band
from flash_export.canonical import Added, Attention, Hidden, Refused, Side, Term
from flash_export.dims import ONE
from flash_export.enlarging import refuse_enlarging
from flash_export.layout import Axes, leaves
from flash_export.lengths import lengths_of_literal
from flash_export.mask_proofs import Prover
from flash_export.mask_terms import FORGETS, Literal, as_hidden, conjuncts, summands
from flash_export.region import Region
from flash_export.shapes import Shapes

SWAMPS = -1e30
"""A score added to this or less is rounded away in fp32 and bf16, so that replacing a score equals adding the fill."""

SWAMPED = -1e38
"""A fill below ``SWAMPS`` that fp32 and bf16 hold."""


@dataclasses.dataclass(slots=True)
class BiasPart:
    """One tensor that stays: ``factor * added``, or ``fill`` where any of ``literals`` is not at its ``keep``.

    The parts are summed in their order; one that ``overrides`` puts its fill in the place of the sum so far. An added
    mask of minus infinity knows the booleans that it was made of as ``hiders``.
    """

    axes: Axes
    node: ir.Node
    added: ir.Value | None = None
    factor: float = 1.0
    literals: tuple[Literal, ...] = ()
    fill: float = 0.0
    overrides: bool = False
    hiders: tuple[Literal, ...] = ()


@dataclasses.dataclass(slots=True)
class MaskPlan:
    """How the terms of one attention are handed to the node: one band as attributes, the rest as one bias.

    ``lengths``: keys beyond a length of each batch entry are hidden as well.
    """

    band: Band | None = None
    lengths: Side | None = None
    parts: list[BiasPart] = dataclasses.field(default_factory=list)


def plan_masks(attention: Attention, region: Region) -> MaskPlan:
    """Decides for every term whether it is dropped, proven and becomes an attribute, or stays a tensor.

    Raises:
        Refused: ``mask_replaces_scores`` for a replaced score whose fill cannot be added instead; ``bias_shape`` for a
            mask that would make more scores.
    """
    prover = Prover(attention, region)
    for term in attention.terms:
        value = term.condition if isinstance(term, Hidden) else term.value
        refuse_enlarging("mask", value, term.axes, term.node, region.shapes)
    plan = MaskPlan(attention.band, attention.lengths)
    terms = [part for term in attention.terms for part in _flattened(term, prover)]
    for index, term in enumerate(terms):
        others = terms[:index] + terms[index + 1 :]
        prover.overridden = any(_overrides(later) for later in terms[index + 1 :])
        _place(term, others, plan, prover)
    _read_lengths(plan, [leaves(attention.rows), leaves(attention.columns)], region)
    return plan


def _read_lengths(plan: MaskPlan, ends: Axes, region: Region) -> None:
    """Takes one mask that is a length of each batch entry out of the bias; the scores have to end in ``ends``."""
    from_the_end = plan.band is not None and plan.band.bottom_right and not plan.band.hides_nothing
    if plan.lengths is not None or from_the_end or any(part.overrides for part in plan.parts):
        return
    for part in plan.parts:
        if [leaves(axis) for axis in part.axes[-2:]] != ends:
            continue
        literals = part.hiders or (part.literals if part.fill == -np.inf else ())
        for literal in literals:
            plan.lengths = lengths_of_literal(literal, part.axes, region)
            if plan.lengths is not None:
                part.literals = tuple(other for other in literals if other is not literal)
                part.added, part.fill = None, -np.inf
                plan.parts = [p for p in plan.parts if p.added is not None or p.literals]
                return


def _place(term: Term, others: list[Term], plan: MaskPlan, prover: Prover) -> None:
    hidden = term if isinstance(term, Hidden) else as_hidden(term, prover.evaluator)
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
    whole = len(kept) == len(conjuncts(Literal(hidden.condition, hidden.keep)))
    if isinstance(term, Added) and whole and not _is_spread(hidden.condition, term.value, prover.shapes):
        hiders = tuple(kept) if hidden.fill == -np.inf else ()
        plan.parts.append(BiasPart(term.axes, term.node, added=term.value, factor=term.factor, hiders=hiders))
        return
    fill = hidden.fill
    if isinstance(term, Hidden) and fill > SWAMPS and all(_like(term, other) for other in others):
        # Whatever the one number is: a row with a visible key forgets it, and one without weighs all keys alike.
        fill = SWAMPED
    elif isinstance(term, Hidden) and fill > SWAMPS:
        raise Refused(
            "mask_replaces_scores",
            f"{term.node.op_type} replaces masked scores by {fill:g} beside other masks or biases: rows whose keys are "
            "all hidden would weigh them otherwise",
            term.node,
            "write masked_fill(hidden, float('-inf')), or add the fill instead of replacing the score",
        )
    overrides = _overrides(term)
    plan.parts.append(BiasPart(hidden.axes, hidden.node, literals=tuple(kept), fill=fill, overrides=overrides))


def _is_spread(condition: ir.Value, added: ir.Value, shapes: Shapes) -> bool:
    """Whether a mask is larger than its condition: T5 adds zeros for each head, query and key to a mask of padding."""
    small, large = shapes.shape(condition), shapes.shape(added)
    if small is None or large is None:
        return False
    return any(d == ONE for d, wide in zip(small[::-1], large[::-1], strict=False) if wide != ONE) or any(
        wide != ONE for wide in large[: len(large) - len(small)]
    )


def _like(term: Hidden, other: Term) -> bool:
    """Whether another term hides scores by the same number, or for good: then no row holds two kinds of hidden keys."""
    return isinstance(other, Hidden) and other.fill in (term.fill, -np.inf)


def _overrides(term: Term) -> bool:
    """Whether a term forgets what stands in its place: a finite fill by Where shows again what was hidden before."""
    return isinstance(term, Hidden) and term.fill != -np.inf


def _may_hide(band: Band, fill: float, others: list[Term], plan: MaskPlan, prover: Prover) -> bool:
    """Whether hiding exactly may stand for the graph's mask, and whether the node has room for one more band."""
    if not _joinable(plan.band, band) or (plan.lengths is not None and band.bottom_right):
        # With lengths the node counts from the last key there is, the mask from the last of the tensor.
        return False
    if fill == -np.inf:
        return not prover.overridden
    if fill > FORGETS:
        return False
    return plan.lengths is None and band.full_rows and all(prover.harmless(term) for term in others)


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


def _flattened(term: Term, prover: Prover, depth: int = MAX_NESTED_SUMS) -> list[Term]:
    """An added sum of masks as its summands, when that lets one of them leave the tensor."""
    if not isinstance(term, Added) or not depth:
        return [term]
    parts = summands(term, prover.shapes)
    if any(prover.aligned(s) and prover.added_band(s.value, s.factor) is not None for s in parts):
        return [part for s in parts for part in _flattened(s, prover, depth - 1)]
    return [term]
