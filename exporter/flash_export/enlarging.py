# SPDX-License-Identifier: Apache-2.0
"""Operands that broadcast into the scores, and those that would make more scores of them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from flash_export.canonical import Refused
from flash_export.dims import ONE, Dim
from flash_export.layout import Axes, size_of
from flash_export.shapes import Shapes


def refuse_enlarging(what: str, value: ir.Value, axes: Axes, node: ir.Node, shapes: Shapes) -> None:
    """Refuses a tensor beside the scores, whose axes are ``axes``, that would make the output larger.

    Args:
        what: what the tensor is to the scores, such as "mask".

    Raises:
        Refused: ``bias_shape``.
    """
    why = why_enlarged(shapes.shape(value), [shapes.normal(size_of(axis)) for axis in axes])
    if why:
        raise Refused(
            "bias_shape",
            f'the {what} "{value.name}" does not broadcast into the scores: {why}',
            node,
            f"give the {what} the scores' rank with each dim 1 or full",
        )


def refuse_longer(number: ir.Value, value: ir.Value, node: ir.Node, shapes: Shapes) -> None:
    """Refuses a number that takes the place of probabilities, which are ``value``, and would make more of them.

    Raises:
        Refused: ``probabilities_changed``.
    """
    own, scores = shapes.shape(number), shapes.shape(value)
    why = why_enlarged(own, scores) if own is not None and scores is not None else ""
    if why:
        raise Refused(
            "probabilities_changed",
            f'"{number.name}" does not broadcast into the probabilities that it replaces: {why}',
            node,
            "write the number as a scalar",
        )


def why_enlarged(shape: Sequence[Dim] | None, scores: Sequence[Dim]) -> str:
    """Why a tensor of ``shape`` would make the scores larger; empty where it does not.

    A fixed number of batch entries or heads beside a dynamic one is right at that number alone, and more at 1. Beside
    queries and keys it is the length of a table, as of 77 positions in a model that is declared with any length. That
    is right at that length alone as well, but the model is meant for no other; at 1 it repeats its only query, where
    the node refuses to run, and the check leaves such a run out (``repeated_queries``).
    """
    if shape is None:
        return "its rank is not known"
    if len(shape) > len(scores):
        return f"it has rank {len(shape)}, the scores {len(scores)}"
    pairs = list(zip(reversed(shape), reversed(scores), strict=False))
    if any(own != ONE and other == ONE for own, other in pairs):
        return f"it has shape {list(shape)} where the scores have length 1"
    fixed = [(own, other) for own, other in pairs[2:] if own.static not in (None, 1) and other.static is None]
    if fixed:
        own, other = fixed[0]
        return f'it has shape {list(shape)}: its {own} stands beside "{other}", which may be another number, and 1'
    return ""
