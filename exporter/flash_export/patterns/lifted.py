# SPDX-License-Identifier: Apache-2.0
"""``Max(scores, lowest)``: XGLM lifts what a mask has made minus infinity to the lowest number of the type.

Nothing else of the scores is that low. A key that is hidden beside a visible one weighs nothing either way; a row of
hidden keys alone becomes the mean of V, which is what the lowest number as the mask's fill says.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from flash_export.canonical import Hidden, Refused, Term
from flash_export.evaluate import Evaluator
from flash_export.mask_terms import as_hidden

BELOW_ALL = -1e30
"""A bound up to this lifts no score that a mask leaves visible."""


def lifted(terms: list[Term], low: float, node: ir.Node, evaluator: Evaluator) -> list[Term]:
    """The terms of ``Max(scores + terms, low)``.

    Raises:
        Refused: ``mask_replaces_scores``: several terms may add up to less than ``low``, or one may hold minus infinity
            for all that is known.
    """
    if not terms:
        return []
    hidden = terms[0] if isinstance(terms[0], Hidden) else as_hidden(terms[0], evaluator)
    if len(terms) > 1 or hidden is None:
        why = "there are several masks and biases" if len(terms) > 1 else "the mask is a tensor of any numbers"
        raise Refused(
            "mask_replaces_scores",
            f"Max lifts masked scores to {low:g}, and {why}: which keys of a fully masked row are lifted is not known",
            node,
            "leave the Max out, or make one mask of a condition: where(visible, 0, lowest)",
        )
    if hidden.fill < low:
        return [dataclasses.replace(hidden, fill=low)]
    return terms
