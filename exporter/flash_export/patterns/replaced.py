# SPDX-License-Identifier: Apache-2.0
"""Masked scores that are replaced by a number beside which they count: they stay in standard operators."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from flash_export.advice import GUARD
from flash_export.canonical import Hidden, Refused, Term
from flash_export.mask_terms import FORGETS


def refuse_replaced(terms: Iterable[Term]) -> None:
    """Refuses scores that are replaced by a number beside which they count.

    Raises:
        Refused: ``mask_replaces_scores``.
    """
    for term in terms:
        if isinstance(term, Hidden) and not term.fill <= FORGETS:  # NaN as well
            raise replaced(term.node, f"{term.fill:g}")


def replaced(node: ir.Node, what: str) -> Refused:
    """Why scores stay that ``node`` replaces by ``what``."""
    return Refused(
        "mask_replaces_scores",
        f"{node.op_type} replaces masked scores by {what}, so that a fully masked row forgets its scores",
        node,
        f"mask with -inf or the type's lowest number, or add the fill instead of replacing the score. {GUARD}",
    )
