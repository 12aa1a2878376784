# SPDX-License-Identifier: Apache-2.0
"""Up to which length a mask may still change its form: beyond it, what was seen at smaller lengths goes on.

A mask made of positions, comparisons, sums and constant factors is piecewise linear in the lengths. Where its pieces
meet is bounded by the sum of its constants times the product of its factors; evaluated at lengths that large, nothing
is left to hide. Operators that bend or repeat positions otherwise (``Log``, ``CumSum``) give no such bound, nor does a
number so large or small that lengths of any use never meet it alone: beside a position two of them may cancel. Where
only truths and constants are mixed, as when a fill of -1e38 is multiplied by a mask, it does no harm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

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
"""No length is as large."""
SENTINEL = 2.0**62
"""A Clip, Min or Max at such a number is none: after factors below ``bands.FAR`` it is still out of reach."""

SMALL = 64
"""Elements of a constant that is read number by number; of a larger one its sides and its largest number count."""

STRUCTURE: dict[str, set[int]] = {
    "ConstantOfShape": {0}, "Expand": {1}, "Gather": {1}, "Pad": {1, 3}, "Reshape": {1}, "Slice": {1, 2, 3, 4},
    "Split": {1}, "Squeeze": {1}, "Tile": {1}, "Trilu": {1}, "Unsqueeze": {1}, "Where": {0},
}  # fmt: skip
"""Operator -> operands that say where numbers go, and are none of the numbers."""

_MOVES = frozenset({
    "Abs", "Cast", "CastLike", "Concat", "ConstantOfShape", "Expand", "EyeLike", "Flatten", "Gather", "Identity", "Neg",
    "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that mix no two numbers."""

_DECIDES = frozenset({
    "And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Sign", "Xor",
})  # fmt: skip
"""Operators with few results, whatever goes in."""

_EXACT = frozenset({
    ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT32, ir.DataType.UINT64, ir.DataType.FLOAT, ir.DataType.DOUBLE,
})  # fmt: skip
"""Types that hold every position up to ``bands.FAR``; others wrap around or round."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """What a value may hold: ``position``, numbers that grow with a length; ``extreme``, numbers out of reach."""

    position: bool = False
    extreme: bool = False

    @classmethod
    def of(cls, kinds: Iterable[_Kind]) -> _Kind:
        kinds = list(kinds)
        return cls(any(k.position for k in kinds), any(k.extreme for k in kinds))


_LENGTH = _Kind(position=True)


def landmarks(value: ir.Value, evaluator: Evaluator) -> tuple[list[int], int] | None:
    """The lengths at which ``value`` may change its form, and one beyond which it does not; None when there is no such.

    The constants are those that the operators see: computed ones and attributes as well as those of the graph.
    """
    marks: set[int] = set()
    factor, offset = 1.0, 1.0
    kinds: dict[ir.Value, _Kind] = {}
    try:
        for node in evaluator.nodes(value):
            if not any(evaluator.symbols(v) for v in node.outputs if v is not None and v.name):
                continue
            constants = {
                i: evaluator.evaluate(v, {})
                for i, v in enumerate(node.inputs)
                if v is not None and not evaluator.symbols(v)
            }
            kind = _kind_after(node, constants, kinds)
            if node.op_type not in LINEAR or kind is None or (node.op_type in ("Div", "Mod") and 1 not in constants):
                return None
            kinds.update(dict.fromkeys(node.outputs, kind))
            arrays = [*constants.values(), *_attributes(node)]
            marks.update(side for a in arrays for side in a.shape if a.size > SMALL and side > 1)
            offset += sum(sum(_numbers(a)) for a in arrays)
            marks.update(int(n) for a in arrays for n in _numbers(a) if n > 1)
            if node.op_type in ("Mul", "Div", "Mod", "Range"):
                steps = [max(n, 1 / n) for a in arrays for n in _numbers(a)]
                factor *= math.prod(steps)
                marks.update(int(n) for n in steps if n > 1)
    except NotEvaluable:
        return None
    reach = factor * offset
    largest = max([math.ceil(reach), *marks]) if reach < UNREACHED else None
    return None if largest is None else (sorted(marks), largest)


def _kind_after(node: ir.Node, constants: dict[int, np.ndarray], kinds: dict[ir.Value, _Kind]) -> _Kind | None:
    """What the node's results may hold; None where positions and numbers out of reach are mixed, or positions lost."""
    structure = STRUCTURE.get(node.op_type, set())
    bounds = node.op_type in ("Clip", "Max", "Min")
    found = [_Kind(extreme=_extreme(array)) for array in _attributes(node)]
    for i, operand in enumerate(node.inputs):
        if operand is None or i in structure:
            continue
        if i in constants:
            found.append(_Kind(extreme=_extreme(constants[i], SENTINEL if bounds else math.inf)))
        else:
            found.append(kinds.get(operand, _LENGTH))
    kind = _Kind.of(found)
    if node.op_type in ("Cast", "CastLike") and kind.position:
        dtype = node.outputs[0].dtype
        if node.op_type == "Cast":
            dtype = ir.DataType(node.attributes["to"].as_int())
        return _Kind() if dtype == ir.DataType.BOOL else kind if dtype in _EXACT else None
    if node.op_type not in _MOVES and kind.position and kind.extreme:
        return None
    return _Kind() if node.op_type in _DECIDES else kind


def _extreme(array: np.ndarray, below: float = math.inf) -> bool:
    """Whether a number of the array is out of reach, by its size (up to ``below``) or by its smallness."""
    if array.dtype.kind not in "iuf":
        return False
    numbers = np.abs(array.astype(np.float64))
    large = np.isfinite(numbers) & (numbers >= UNREACHED) & (numbers < below)
    return bool((large | ((numbers > 0) & (numbers <= 1 / UNREACHED))).any())


def _numbers(array: np.ndarray) -> list[float]:
    """The magnitudes in reach: each of a small array, the largest of a large one."""
    if array.dtype.kind not in "iuf":
        return []
    numbers = np.abs(array.reshape(-1).astype(np.float64))
    numbers = numbers[(numbers > 1 / UNREACHED) & (numbers < UNREACHED)]
    if array.size > SMALL and numbers.size:
        # As a factor its smallest counts as well.
        numbers = np.array([numbers.max(), numbers.min()])
    return [float(n) for n in numbers]


def _attributes(node: ir.Node) -> list[np.ndarray]:
    """The numbers that stand in a node itself: the value of ConstantOfShape, the diagonal of EyeLike."""
    result = []
    for name, attribute in node.attributes.items():
        if attribute.type == ir.AttributeType.TENSOR:
            result.append(np.asarray(attribute.as_tensor().numpy()))
        elif attribute.type == ir.AttributeType.FLOAT or name == "k":
            result.append(np.asarray(attribute.value, dtype=np.float64))
    return result
