# SPDX-License-Identifier: Apache-2.0
"""Masked scores that are cast to a narrower type: a fill that it does not hold becomes minus infinity.

A row whose keys are all filled is NaN then, or 0 with a guard, and no longer the mean of V. The float32 twins that the
check runs have no narrower type and would not show it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Refused, Term
from flash_export.evaluate import Evaluator
from flash_export.mask_terms import as_hidden, cast_number

_SCORE = 128.0
"""What an ordinary score takes off a fill that it is added to."""


def refuse_lost_fills(terms: Iterable[Term], node: ir.Node, evaluator: Evaluator) -> None:
    """Refuses a Cast of the scores that makes minus infinity of a finite fill among ``terms``.

    Raises:
        Refused: ``mask_replaces_scores``.
    """
    to = ir.DataType(g.int_attribute(node, "to", 0))
    for term in terms:
        hidden = as_hidden(term, evaluator) if isinstance(term, Added) else term
        if hidden is None or not np.isfinite(hidden.fill):
            continue
        number = cast_number(np.array([hidden.fill - (_SCORE if isinstance(term, Added) else 0.0)]), to)
        if number is not None and np.isinf(number).any():
            raise Refused(
                "mask_replaces_scores",
                f"a Cast of the masked scores to {to.name} makes minus infinity of the {hidden.fill:g} that hides keys",
                node,
                "mask the scores behind the Cast, or by minus infinity",
            )
