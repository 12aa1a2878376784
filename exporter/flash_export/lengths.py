# SPDX-License-Identifier: Apache-2.0
"""Padding on the right that is written as lengths: ``position < length`` becomes the operator's ``kv_lengths``.

Only a comparison with proven positions counts, never a mask that happens to look like padding.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.bands import trials_of
from flash_export.canonical import Side
from flash_export.dims import ONE
from flash_export.layout import Axes, Axis, follow, leaves, size_of, unify
from flash_export.mask_terms import Literal
from flash_export.region import Region

_SWAPPED = {"Less": "Greater", "LessOrEqual": "GreaterOrEqual", "Greater": "Less", "GreaterOrEqual": "LessOrEqual"}
_LARGEST = 2**31 - 1
_MOST_STEPS = 8
_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


def lengths_of_literal(literal: Literal, scores: Axes, region: Region) -> Side | None:
    """The number of visible keys of each batch entry, where ``literal`` says just that; None for any other mask.

    Args:
        literal: a boolean tensor that broadcasts to the scores.
        scores: the axes of the scores there.
    """
    found = _comparison(literal, scores, region) if len(scores) == 4 and region.opset >= 12 else None
    if found is None:
        return None
    node, keep, axes = found
    columns = leaves(scores[3])
    if not axes or leaves(axes[-1]) != columns or any(leaves(a) not in ([], leaves(scores[0])) for a in axes[:-1]):
        return None
    for at, operator in ((0, node.op_type), (1, _SWAPPED[node.op_type])):
        position, count = node.inputs[at], node.inputs[1 - at]
        if position is None or count is None or not _are_positions(position, columns, region):
            continue
        # visible: position < count, or position <= count; a mask of hidden keys says it the other way round.
        if operator in (("Less", "LessOrEqual") if keep else ("GreaterOrEqual", "Greater")):
            shape = region.shapes.shape(count)
            if region.shapes.dtype(count) in _INTEGERS and shape is not None and shape[-1:] in ((), (ONE,)):
                return Side(_counted(count, operator in ("LessOrEqual", "Greater"), region), axes, node)
    return None


def _comparison(literal: Literal, scores: Axes, region: Region) -> tuple[ir.Node, bool, Axes] | None:
    """The comparison above layout operators, Not and Cast that makes ``literal``, its sense, and its axes."""
    value, keep, expected = literal.value, literal.keep, scores
    for _ in range(_MOST_STEPS):
        chain = follow(value, region.shapes, scalar=None)
        if chain is None or len(chain.last) > len(expected) or not _fit(chain.last, expected, region):
            return None
        node, expected = chain.values[0].producer(), chain.axes[0]
        if g.is_op(node, *_SWAPPED) and node is not None:
            return node, keep, expected
        if node is None or not g.is_op(node, "Not", "Cast") or node.inputs[0] is None:
            return None
        if g.is_op(node, "Cast") and region.shapes.dtype(node.inputs[0]) != ir.DataType.BOOL:
            return None
        value, keep = node.inputs[0], keep != g.is_op(node, "Not")
    return None


def _fit(own: Axes, scores: Axes, region: Region) -> bool:
    """Makes the axes of a mask those of the scores that it broadcasts to."""
    pairs = list(zip(reversed(own), reversed(scores), strict=False))
    return all(not leaves(a) or (bool(leaves(b)) and unify(b, a, region.shapes)) for a, b in pairs)


def _are_positions(value: ir.Value, columns: Axis, region: Region) -> bool:
    """Whether ``value`` is 0, 1, 2, ... along the keys, proven at many lengths."""
    shape = region.shapes.shape(value)
    if shape is None or any(dim != ONE for dim in shape[:-1]) or not region.evaluator.evaluable(value):
        return False
    seqlen_kv = region.shapes.normal(size_of(columns))
    trials = trials_of(value, ONE, seqlen_kv, region.evaluator, lambda a: np.array_equal(a[0], np.arange(a.shape[1])))
    return trials is not None and all(trials)


def _counted(count: ir.Value, inclusive: bool, region: Region) -> ir.Value:
    """The number of keys before ``count``, or up to it, within what int32 holds."""
    drafts = region.drafts
    wide = drafts.op("Cast", count, to=int(ir.DataType.INT64))
    bounds = (drafts.constant(np.array(n, dtype=np.int64)) for n in (-1 if inclusive else 0, _LARGEST - 1))
    clipped = drafts.op("Clip", wide, *bounds)
    return drafts.op("Add", clipped, drafts.constant(np.array(1, dtype=np.int64))) if inclusive else clipped
