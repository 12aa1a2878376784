# SPDX-License-Identifier: Apache-2.0
"""Proves what a mask hides: it is evaluated at many lengths and compared with bands."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import onnx_ir as ir

from flash_export.bands import Band, Seen, Visible, match, trials_of
from flash_export.canonical import Attention, Hidden, Term
from flash_export.layout import leaves, size_of
from flash_export.mask_terms import FORGETS, Literal, conjuncts
from flash_export.region import Region


class Prover:
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
        trials = self._trials(literal.value, lambda mask: Visible.of(mask.astype(bool) == literal.keep))
        return None if trials is None else match(trials)

    def added_band(self, value: ir.Value, factor: float) -> tuple[Band, float] | None:
        """The band and the fill of an added tensor that holds 0 and one fill, proven; None for any other."""
        key = (value, factor, self._rows, self._columns)
        if key not in self._proofs:
            self._proofs[key] = self._added_band(value, factor)
        return cast("tuple[Band, float] | None", self._proofs[key])

    def _added_band(self, value: ir.Value, factor: float) -> tuple[Band, float] | None:
        if not self.evaluator.evaluable(value):
            return None
        trials = self._trials(value, lambda bias: (_fills(bias), Visible.of(bias == 0)))
        if trials is None:
            return None
        fills = {fill for found, _ in trials for fill in found}
        if len(fills) > 1 or any(np.isnan(f) or f * factor > 0 for f in fills):
            return None
        fill = fills.pop() * factor if fills else -np.inf
        if fill > FORGETS:
            return None
        band = match([visible for _, visible in trials])
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
        trials = self._trials(term.value, lambda bias: bool(np.abs(bias * term.factor).max(initial=0) < 1e4))
        return trials is not None and all(trials)

    def _trials(self, value: ir.Value, look: Callable[[np.ndarray], Seen]) -> list[Seen] | None:
        return trials_of(value, self._rows, self._columns, self.evaluator, look)


def _fills(bias: np.ndarray) -> set[float]:
    """The numbers beside 0, where there are no more than two kinds; a NaN among them where there are more."""
    if not bias.size:
        return set()
    low, high = bias.min(), bias.max()
    more = set() if ((bias == low) | (bias == high)).all() else {np.nan}
    return {float(x) for x in (low, high) if x != 0} | more
