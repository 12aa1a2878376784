# SPDX-License-Identifier: Apache-2.0
"""Conditions on lengths alone inside a mask (``S > 512``), and whether positions and lengths are compared one for one.

A mask is proven at chosen lengths, which is sound only where nothing happens between them. So every comparison on the
way to it must be one of these, told by the differences of its two sides at small sizes: a comparison of positions, all
of them counted from one place (``mask_frames``); one of a single length with a number, whose switching point is then
among the lengths that are tried; one whose outcome no length changes; or the number of queries against that of keys.
Anything else, a quotient of a length, a fraction of one made whole or a product of two, leaves the mask a
tensor. So does a table in the graph of which some length chooses the place that is read, unless more of it is read the
longer another one is (rows T-S to T of a buffer): then the longest shows all of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from flash_export.dims import Dim
from flash_export.evaluate import Evaluator, NotEvaluable
from flash_export.mask_frames import Frames, MixedFrames
from flash_export.reach import STRUCTURE

_COMPARES = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_LOGIC = frozenset({"And", "Not", "Or", "Xor"})
_BENDS = frozenset({"Abs", "Clip", "Max", "Min", "Sign"})
"""Numbers that change their slope where two operands meet."""
_STEPS = frozenset({"Ceil", "Div", "Floor", "Mod", "Round"})
"""Numbers that jump again and again; a quotient of floats does not."""
_READS = {"Gather": {1}, "GatherElements": {1}, "GatherND": {1}, "Slice": {1}}
"""Operator -> operands that say where in a tensor it begins to read."""
_SHAPES_ONLY = {"Reshape": {1}, "Expand": {1}, "Squeeze": {1}, "Unsqueeze": {1}}
"""Operator -> operands that say a shape, which the result shows by itself."""

_BASE, _STRIDES = 5, (1, 2, 17)
"""The smallest size at which differences are looked at, and how far they are followed."""
_MOST = 64
"""Elements of a value of one size at all lengths; a larger one holds positions."""


class _Unprovable(Exception):
    """Something may happen at lengths that nobody tries."""


@dataclasses.dataclass(frozen=True, slots=True)
class Switches:
    """The lengths at which conditions on a length switch, and whether queries and keys are compared in number."""

    points: list[int]
    compares: bool = False


def switches_of(
    value: ir.Value, names: Iterable[str], seqlen_q: Dim, seqlen_kv: Dim, evaluator: Evaluator
) -> Switches | None:
    """Where conditions on lengths switch; None where something may happen at lengths between.

    Args:
        value: what depends on lengths alone.
        names: the dynamic dims that it and the scores depend on.
        seqlen_q: the number of queries.
        seqlen_kv: the number of keys.
        evaluator: of the graph.
    """
    try:
        search = _Search(value, sorted(names), seqlen_q, seqlen_kv, evaluator)
    except (NotEvaluable, MixedFrames, _Unprovable):
        return None
    return Switches(sorted(search.points), search.compares)


class _Search:
    """One walk over the nodes that compute a value."""

    def __init__(self, value: ir.Value, names: list[str], seqlen_q: Dim, seqlen_kv: Dim, evaluator: Evaluator) -> None:
        self.points: set[int] = set()
        self.compares = False
        self._ends = {seqlen_q.symbol, seqlen_kv.symbol}
        self._evaluator = evaluator
        self._switching: set[str] = set()  # names of the dims that conditions on a length ask for
        self._truths: set[ir.Value] = set()  # truths, and numbers made of nothing but truths and constants
        self._switched: set[ir.Value] = set()  # values that such a condition has a part in
        self._tables: set[ir.Value] = set()  # values with unequal numbers of the graph's constants in them
        self._base = {name: _BASE + 2 * i for i, name in enumerate(names)}
        self._directions = self._ways(value, names)
        self._frames = Frames(seqlen_q, seqlen_kv, self._base, self._shifts(seqlen_kv - seqlen_q))
        for node in _numeric(value, evaluator):
            if any(evaluator.symbols(v) for v in node.outputs if v is not None and v.name):
                self._look(node)
        if len(self._switching) > 1:
            raise _Unprovable
        self._frames.refuse_mixed()

    def _shifts(self, offset: Dim) -> list[int]:
        return [offset.evaluate(self._at(way, 1)) - offset.evaluate(self._base) for way in self._directions]

    def _ways(self, value: ir.Value, names: list[str]) -> list[dict[str, int]]:
        """The directions in which sizes may change: each alone, or all together where some go only together."""
        together = dict.fromkeys(names, 1)
        try:
            self._evaluator.evaluate(value, self._base)
        except NotEvaluable:
            self._base = dict.fromkeys(names, _BASE)
        found = [{name: 1} for name in names if self._runs(value, {name: 1})]
        return found if len(found) == len(names) else [*found, together]

    def _runs(self, value: ir.Value, way: Mapping[str, int]) -> bool:
        try:
            self._evaluator.evaluate(value, self._at(way, 1))
        except NotEvaluable:
            return False
        return True

    def _at(self, way: Mapping[str, int], stride: int) -> dict[str, int]:
        return {name: size + stride * way.get(name, 0) for name, size in self._base.items()}

    def _look(self, node: ir.Node) -> None:
        operands = [v for i, v in enumerate(node.inputs) if v is not None and i not in _hidden(node)]
        moving = [v for v in operands if self._evaluator.symbols(v)]
        numbers = [v for v in moving if v not in self._truths]
        if (node.op_type == "Mul" and len(numbers) > 1) or (numbers and node.op_type in _STEPS):
            self._refuse_lengths(node, numbers)
            if node.op_type == "Mul" and sum(self._varies(v) for v in numbers) > 1:
                raise _Unprovable  # no line: where it bends, or is rounded, no landmark says
        elif node.op_type == "Trilu":
            self._look_at_triangle(node)
        elif numbers and node.op_type in _COMPARES | _BENDS:
            for one, other in _pairs(node, operands):
                self._look_at_difference(node, one, other)
        elif numbers and node.op_type in ("Cast", "CastLike"):
            self._look_at_cast(node, numbers[0])
        self._look_at_tables(node)
        outputs = [v for v in node.outputs if v is not None]
        if node.op_type in _COMPARES | _LOGIC or not numbers:
            self._truths.update(outputs)
        if any(v in self._switched for v in moving):
            self._switched.update(outputs)

    def _varies(self, value: ir.Value) -> bool:
        array = self._evaluator.evaluate(value, self._base)
        return array.size > 1 and bool((array != array.flat[0]).any())

    def _look_at_triangle(self, node: ir.Node) -> None:
        diagonal = node.inputs[1] if len(node.inputs) > 1 else None
        moves = diagonal is not None and bool(self._evaluator.symbols(diagonal))
        slopes = self._slopes(diagonal, None) if moves and diagonal is not None else []
        self._frames.add_triangle(self._evaluator.evaluate(node.outputs[0], self._base).shape, slopes)

    def _refuse_lengths(self, node: ir.Node, numbers: list[ir.Value]) -> None:
        """Positions may be multiplied and divided, since all of them are tried; lengths may not."""
        if node.op_type == "Div" and self._evaluator.evaluate(numbers[0], self._base).dtype.kind == "f":
            return
        if any(slope != 0 for value in numbers for slope in self._slopes(value, None)):
            raise _Unprovable

    def _look_at_cast(self, node: ir.Node, number: ir.Value) -> None:
        """A truth made of a number is a comparison with 0; a whole number made of a fraction jumps again and again."""
        start = self._evaluator.evaluate(number, self._base)
        into = self._evaluator.evaluate(node.outputs[0], self._base).dtype.kind
        if into == "b":
            self._look_at_difference(node, number, None)
        elif start.dtype.kind == "f" and into in "iu":
            slopes = self._slopes(number, None)
            if any(slopes) and not all(float(n).is_integer() for n in (*slopes, *start.reshape(-1)[:_MOST])):
                raise _Unprovable

    def _look_at_tables(self, node: ir.Node) -> None:
        """Follows tables, and refuses to read one at a place that lengths choose and that no longer length includes."""
        structure = STRUCTURE.get(node.op_type, set())
        data = [v for i, v in enumerate(node.inputs) if v is not None and i not in structure]
        if not any(v in self._tables or self._is_table(v) for v in data):
            return
        self._tables.update(v for v in node.outputs if v is not None)
        for place in (node.inputs[i] for i in _READS.get(node.op_type, ()) if i < len(node.inputs)):
            if place is None or not self._evaluator.symbols(place):
                continue
            slopes = self._slopes(place, None)
            ways = [*self._directions, dict.fromkeys(self._base, 1)]
            if any(abs(slope) not in (0, 1) for slope in slopes) or (
                any(slopes) and not any(self._reads_on(place, node.outputs[0], way) for way in ways)
            ):
                raise _Unprovable
            if any(slopes):
                self._frames.add_moving_table()

    def _reads_on(self, place: ir.Value, read: ir.Value, way: Mapping[str, int]) -> bool:
        """Whether lengths that grow in this direction read more from the same place."""
        further = self._at(way, 2)
        begins, later = (self._evaluator.evaluate(place, sizes) for sizes in (self._base, further))
        if begins.ndim != later.ndim:
            return False
        both = tuple(slice(min(a, b)) for a, b in zip(begins.shape, later.shape, strict=True))
        if not np.array_equal(begins[both], later[both]):
            return False
        return self._evaluator.evaluate(read, further).size > self._evaluator.evaluate(read, self._base).size

    def _is_table(self, value: ir.Value) -> bool:
        if self._evaluator.symbols(value):
            return False
        array = self._evaluator.evaluate(value, {})
        return array.size > 1 and bool((array != array.flat[0]).any())

    def _look_at_difference(self, node: ir.Node, one: ir.Value, other: ir.Value | None) -> None:
        slopes = self._slopes(one, other)
        start = self._difference(one, other, self._base)
        if not self._has_one_size(one, other):
            if not self._is_foregone(node, one, other):
                self._allow_positions(start, [s for s in slopes if s != 0])
                self._frames.add_comparison(start, slopes)
            return
        if all(slope == 0 for slope in slopes) or self._is_decided(start, slopes):
            return
        if one in self._switched or other in self._switched:
            raise _Unprovable
        moving = [(way, slope) for way, slope in zip(self._directions, slopes, strict=True) if slope != 0]
        at_zero = start - sum(slope * self._base[name] for way, slope in moving for name in way)
        if len(moving) == 2 and moving[0][1] == -moving[1][1] and not at_zero.any():
            if {name for way, _ in moving for name in way} != self._ends:
                raise _Unprovable  # between these two, no lengths are tried for it
            self.compares = True
            self._switched.update(v for v in node.outputs if v is not None)
            return
        if len(moving) != 1 or (len(moving[0][0]) != 1 and len(self._directions) > 1):
            raise _Unprovable
        way, slope = moving[0]
        base = next(self._base[name] for name in way)
        for zero in base - start.reshape(-1) / slope:
            if zero > 0:
                near = math.floor(zero)
                self.points.update(n for n in range(near - 1, near + 3) if n > 0)
        self._switching.update(way if len(way) == 1 else ["together"])
        self._switched.update(v for v in node.outputs if v is not None)

    def _is_decided(self, start: np.ndarray, slopes: list[float]) -> bool:
        """Whether the difference keeps its sign at all sizes, 0 apart."""
        at_zero = start.astype(np.float64)
        for way, slope in zip(self._directions, slopes, strict=True):
            at_zero = at_zero - slope * next(self._base[name] for name in way)
        rising, falling = all(s >= 0 for s in slopes), all(s <= 0 for s in slopes)
        return bool((rising and (at_zero >= 0).all()) or (falling and (at_zero <= 0).all()))

    def _is_foregone(self, node: ir.Node, one: ir.Value, other: ir.Value | None) -> bool:
        """Whether a comparison of positions has one outcome at all of them, as of a key with the number of keys."""
        apart = [self._difference(one, other, self._base)]
        apart += [self._difference(one, other, self._at(way, 17)) for way in self._directions]
        least, most = [float(d.min()) for d in apart], [float(d.max()) for d in apart]
        at_least = 0.0 if node.op_type in _BENDS | {"Less", "GreaterOrEqual"} else 1e-9
        at_most = 0.0 if node.op_type in _BENDS | {"Greater", "LessOrEqual"} else 1e-9
        return min(least) == least[0] >= at_least or max(most) == most[0] <= -at_most

    def _allow_positions(self, start: np.ndarray, slopes: list[float]) -> None:
        """Positions beside lengths: each step counts as much as a position's, and no more than two lengths, apart."""
        if not slopes:
            return
        steps = {abs(float(s)) for axis in range(start.ndim) for s in np.unique(np.diff(start, axis=axis))} - {0.0}
        if len(steps | {abs(s) for s in slopes}) > 1 or len(slopes) > 2 or (len(slopes) == 2 and sum(slopes) != 0):
            raise _Unprovable

    def _has_one_size(self, one: ir.Value, other: ir.Value | None) -> bool:
        here = self._difference(one, other, self._base)
        return here.size <= _MOST and all(
            self._difference(one, other, self._at(way, 2)).shape == here.shape for way in self._directions
        )

    def _difference(self, one: ir.Value, other: ir.Value | None, sizes: Mapping[str, int]) -> np.ndarray:
        left = self._evaluator.evaluate(one, sizes).astype(np.float64)
        right = np.zeros(()) if other is None else self._evaluator.evaluate(other, sizes).astype(np.float64)
        try:
            left, right = np.broadcast_arrays(left, right)
        except ValueError:  # the two only meet at other sizes
            raise _Unprovable from None
        if left.size == 0:
            raise _Unprovable  # where it has no numbers, nothing is seen of those that it has at other sizes
        return left - right

    def _slopes(self, one: ir.Value, other: ir.Value | None) -> list[float]:
        """What the difference gains by one step of each direction, the same in every element that both sizes have."""
        start = self._difference(one, other, self._base)
        found = []
        for way in self._directions:
            gains = set()
            for stride in _STRIDES:
                there = self._difference(one, other, self._at(way, stride))
                if there.ndim != start.ndim:
                    raise _Unprovable
                both = tuple(slice(min(a, b)) for a, b in zip(start.shape, there.shape, strict=True))
                gain = (there[both] - start[both]) / stride
                gains.update(np.unique(np.round(gain, 9)).tolist())
            if len(gains) > 1 or not all(math.isfinite(g) for g in gains):
                raise _Unprovable
            found.append(gains.pop() if gains else 0.0)
        return found


def _hidden(node: ir.Node) -> set[int]:
    return _SHAPES_ONLY.get(node.op_type, set())


def _numeric(value: ir.Value, evaluator: Evaluator) -> list[ir.Node]:
    """The nodes whose numbers get into ``value``, in order; those that say shapes alone are left out."""
    reached: set[ir.Value] = {value}
    kept = []
    for node in reversed(evaluator.nodes(value)):
        if any(v in reached for v in node.outputs):
            kept.append(node)
            reached.update(v for i, v in enumerate(node.inputs) if v is not None and i not in _hidden(node))
    return kept[::-1]


def _pairs(node: ir.Node, operands: list[ir.Value]) -> list[tuple[ir.Value, ir.Value | None]]:
    if node.op_type in ("Abs", "Sign"):
        return [(operands[0], None)]
    if node.op_type == "Clip":
        if len(operands) == 1:  # before opset 11 the bounds are attributes
            raise _Unprovable
        return [(operands[0], bound) for bound in operands[1:]]
    return list(itertools.combinations(operands, 2))
