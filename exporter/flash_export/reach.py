# SPDX-License-Identifier: Apache-2.0
"""Up to which length a mask may still change its form: beyond it, what was seen at smaller lengths goes on.

A mask made of positions, comparisons, sums and constant factors is piecewise linear in the lengths. Where its pieces
meet is bounded by the sum of its constants times the product of its factors; evaluated at lengths that large, nothing
is left to hide. Operators that bend or repeat positions otherwise (``Log``, ``CumSum``) give no such bound.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from flash_export.evaluate import Evaluator, NotEvaluable

_NAMES = (
    "Abs Add And Cast CastLike Clip Concat ConstantOfShape Div Equal Expand EyeLike Flatten Floor Ceil Gather Greater "
    "GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg Not Or Pad Range Reshape Round Sign Slice Split "
    "Squeeze Sub Tile Transpose Trilu Unsqueeze Where Xor"
)
LINEAR = frozenset(_NAMES.split())
"""Operators whose result is piecewise linear in their inputs."""

UNREACHED = 1e9
"""No length is as large: a constant beyond is a fill, or a bound such as the largest int64 of a Slice."""

SMALL = 64
"""Elements of a constant that is read number by number; a larger one is a buffer, and its sides count."""


def landmarks(value: ir.Value, evaluator: Evaluator) -> tuple[list[int], int] | None:
    """The lengths at which ``value`` may change its form, and one beyond which it does not; None when there is no such.

    The constants are those that the operators see: computed ones and attributes as well as those of the graph.
    """
    marks: set[int] = set()
    factor, offset = 1.0, 1.0
    try:
        for node in evaluator.nodes(value):
            if not any(evaluator.symbols(v) for v in node.outputs if v is not None and v.name):
                continue
            if node.op_type not in LINEAR:
                return None
            constants = [v for v in node.inputs if v is not None and not evaluator.symbols(v)]
            if node.op_type in ("Div", "Mod") and node.inputs[1] not in constants:
                return None
            arrays = [*(evaluator.evaluate(v, {}) for v in constants), *_attributes(node)]
            marks.update(side for a in arrays for side in a.shape if a.size > SMALL and side > 1)
            numbers = np.abs([n for a in arrays for n in _numbers(a)])
            offset += float(numbers.sum())
            marks.update(int(n) for n in numbers if n > 1)
            if node.op_type in ("Mul", "Div", "Mod", "Range"):
                steps = [max(n, 1 / n) for n in numbers if n > 1 / UNREACHED]
                factor *= math.prod(steps)
                marks.update(int(n) for n in steps if n > 1)
    except NotEvaluable:
        return None
    reach = factor * offset
    largest = max([math.ceil(reach), *marks]) if reach < UNREACHED else None
    return None if largest is None else (sorted(marks), largest)


def _numbers(array: np.ndarray) -> list[float]:
    if array.size > SMALL or array.dtype.kind not in "iuf":
        return []
    numbers = array.reshape(-1).astype(np.float64)
    return [float(n) for n in numbers if np.isfinite(n) and abs(n) < UNREACHED]


def _attributes(node: ir.Node) -> list[np.ndarray]:
    """The numbers that stand in a node itself: the value of ConstantOfShape, the diagonal of EyeLike."""
    result = []
    for name, attribute in node.attributes.items():
        if attribute.type == ir.AttributeType.TENSOR:
            result.append(np.asarray(attribute.as_tensor().numpy()))
        elif attribute.type == ir.AttributeType.FLOAT or name == "k":
            result.append(np.asarray(attribute.value, dtype=np.float64))
    return result
