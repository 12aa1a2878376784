# SPDX-License-Identifier: Apache-2.0
"""Masked scores that are cast to a type of a smaller range: what it does not hold becomes minus infinity.

A row whose keys are all filled is NaN then, or 0 with a guard, and no longer the mean of V. The float32 twins that the
check runs have no smaller type and would not show it. So what is added must be known to fit: minus infinity, or fills
that the type holds even where all of them hide one key.
"""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Refused, Term
from flash_export.mask_terms import as_hidden, cast_number
from flash_export.region import Region

_SCORE = 128.0
"""What an ordinary score takes off a fill that it is added to."""


def narrowing(node: ir.Node, region: Region) -> ir.DataType | None:
    """The type that a Cast of the scores makes of them, where that may not hold what they hold; None for any other."""
    to, own = ir.DataType(g.int_attribute(node, "to", 0)), region.shapes.dtype(node.inputs[0])
    return None if own is not None and _largest(own) <= _largest(to) else to


def refuse_lost_fills(terms: Iterable[Term], to: ir.DataType, node: ir.Node, region: Region, *, cast: bool) -> None:
    """Refuses scores of the smaller range ``to`` where that may make minus infinity of what ``terms`` add or fill.

    Args:
        to: what ``narrowing`` says of a Cast.
        node: that Cast, or with ``cast`` false one behind it, where more is added or all of it multiplied. What is not
            known to be a mask is of the type already there.

    Raises:
        Refused: ``mask_replaces_scores``.
    """
    lowest = 0.0
    for term in terms:
        hidden = as_hidden(term, region.evaluator) if isinstance(term, Added) else term
        if hidden is None:
            assert isinstance(term, Added)
            if not cast:
                continue
            raise _lost(
                f"what {term.value.name} adds to them, if that hides keys by a number beyond {to.name}", to, node
            )
        if not np.isfinite(hidden.fill):
            continue
        before = f", added to {lowest:g}" if lowest else ""
        lowest += hidden.fill - (_SCORE if isinstance(term, Added) and cast else 0.0)
        number = cast_number(np.array([lowest]), to)
        if number is None or np.isinf(number).any():
            raise _lost(f"the {hidden.fill:g} that hides keys{before}", to, node)


def _largest(dtype: ir.DataType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy()).max)


def _lost(what: str, to: ir.DataType, node: ir.Node) -> Refused:
    return Refused(
        "mask_replaces_scores",
        f"masked scores that a Cast made {to.name} hold minus infinity instead of {what}",
        node,
        "mask the scores once, behind the Cast, or by a boolean and minus infinity, or leave them in their type up to "
        "the softmax",
    )
