# SPDX-License-Identifier: Apache-2.0
"""Probabilities set to zero where the scores were masked: what the mask's number was no longer matters.

``Where(hidden, 0, softmax(Where(hidden, fill, scores)))`` is how ESPnet, NeMo and DeBERTa mask. Hidden keys weigh
nothing, and a row without a visible key gives 0: a mask of minus infinity, whatever the fill.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Hidden, Refused, Term
from flash_export.enlarging import refuse_longer
from flash_export.mask_terms import uniform
from flash_export.patterns.same_value import same_value
from flash_export.patterns.scores import Expression
from flash_export.region import Region, is_product

DROPS = -1e4
"""A fill up to this is rounded away beside any visible score above -9,800; NeMo and BERT write it."""

_CONE = 64
"""Values above a bias that are looked at."""
_LARGE = 1 << 16
"""Elements of a constant that is looked through for the numbers of a mask."""


def zeroing(node: ir.Node, value: ir.Value, region: Region) -> tuple[ir.Value, bool] | None:
    """The condition of ``Where(condition, 0, value)`` or ``Where(condition, value, 0)``, and its sense "visible".

    Raises:
        Refused: ``probabilities_changed`` for a zero that would make more probabilities.
    """
    if not g.is_op(node, "Where") or node.inputs[0] is None or node.inputs[0] is value:
        return None
    for at, keep in ((2, False), (1, True)):
        other = node.inputs[3 - at]
        if node.inputs[at] is value and other is not value and other is not None:
            if uniform(other, region.evaluator) != 0.0:
                return None
            refuse_longer(other, value, node, region.shapes)
            return node.inputs[0], keep
    return None


def apply(node: ir.Node, value: ir.Value, expression: Expression, region: Region) -> None:
    """Turns the mask of the scores that ``node`` repeats on the probabilities into one of minus infinity.

    Raises:
        Refused: ``probabilities_changed``: the scores have no such mask, or another one may hide the rest of a row.
    """
    found = zeroing(node, value, region)
    assert found is not None
    for index, term in enumerate(expression.terms):
        if isinstance(term, Hidden) and term.keep == found[1] and same_value(term.condition, found[0]):
            others = expression.terms[:index] + expression.terms[index + 1 :]
            fits = term.axes == expression.axes and expression.sinks is None
            if fits and (term.fill == -np.inf or (term.fill <= DROPS and not any(map(_may_hide, others)))):
                expression.terms[index] = dataclasses.replace(term, fill=-np.inf)
                return
    raise Refused(
        "probabilities_changed",
        "Where sets probabilities to 0, and the scores have no mask of the same condition that hides for sure",
        node,
        "mask the scores with minus infinity by the same condition, or leave the second mask out",
    )


def _may_hide(term: Term) -> bool:
    """Whether a term may push visible scores down to a fill: a mask, or a tensor whose numbers the graph is given."""
    if isinstance(term, Hidden):
        return term.fill != -np.inf
    todo, seen = [term.value], {term.value}
    while todo:
        value = todo.pop()
        node, tensor = value.producer(), value.const_value
        if node is None and (value.is_graph_input() or tensor is None or tensor.size > _LARGE):
            return True
        numbers = g.constant(value)
        if numbers is not None and numbers.dtype.kind == "f" and (numbers * term.factor).min(initial=0.0) <= DROPS / 10:
            return True
        if node is None or is_product(node) or g.is_op(node, "Gemm", "LayerNormalization", "Shape", "Size"):
            continue
        picked = g.is_op(node, "Gather", "GatherElements", "GatherND", "Slice")
        new = [v for v in node.inputs[: 1 if picked else None] if v is not None and v not in seen]
        seen.update(new)
        todo.extend(new)
        if len(seen) > _CONE:
            return True
    return False
