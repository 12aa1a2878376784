# SPDX-License-Identifier: Apache-2.0
"""Evaluates the part of a graph that depends on lengths alone, at any lengths: what proofs about masks rest on.

The subgraph that computes a value is cut out at its Shape operators, whose results are written in as numbers, and run
by onnx's reference evaluator. A value that depends on the data of a graph input cannot be evaluated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from flash_export import graph as g
from flash_export.dims import Dim
from flash_export.reference_run import run_nodes
from flash_export.shapes import Shapes

MAX_NODES = 400
"""A mask is computed by tens of nodes; a larger cut is part of the model."""

_PURE_OPS_NAMES = (
    "Abs Add And Cast CastLike Ceil Clip Concat ConstantOfShape CumSum Div Equal Expand EyeLike Flatten "
    "Floor Gather GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Log Max Min Mod "
    "Mul Neg Not Or Pad Pow Range Reciprocal ReduceMax ReduceMin ReduceSum Reshape Round ScatterND Sign "
    "Slice Split Sqrt Squeeze Sub Tile Transpose Trilu Unsqueeze Where Xor Constant"
)
PURE_OPS = frozenset(_PURE_OPS_NAMES.split())
"""Deterministic operators that masks, scales and position biases are made of."""

MAX_ELEMENTS = 1 << 25
"""No tensor on the way to a value may have more elements (256 MiB of int64)."""


class NotEvaluable(Exception):
    """The value depends on data, on an unknown rank, or on an operator outside ``PURE_OPS``."""


class TooLarge(NotEvaluable):
    """A tensor on the way to the value would exceed ``MAX_ELEMENTS`` at these sizes."""


@dataclasses.dataclass(slots=True)
class _Cut:
    nodes: list[ir.Node]
    lengths: dict[str, tuple[Dim, ...]]
    constants: dict[str, np.ndarray]
    evaluator: ReferenceEvaluator | None


class Evaluator:
    """Evaluates values of one graph; cuts are kept, so that many sites with one mask pay once."""

    def __init__(self, shapes: Shapes, opset: int) -> None:
        self._shapes = shapes
        self._opset = opset
        self._cuts: dict[ir.Value, _Cut | NotEvaluable] = {}

    def constants(self, value: ir.Value) -> list[np.ndarray]:
        """The constant arrays that ``value`` is computed from.

        Raises:
            NotEvaluable: see the class.
        """
        return list(self._cut(value).constants.values())

    def symbols(self, value: ir.Value) -> set[str]:
        """The names of the dynamic dims that ``value`` depends on.

        Raises:
            NotEvaluable: see the class.
        """
        cut = self._cut(value)
        dims = (self._shapes.normal(d) for contents in cut.lengths.values() for d in contents)
        return {name for dim in dims for name in dim.symbols}

    def nodes(self, value: ir.Value) -> list[ir.Node]:
        """The nodes that compute ``value`` from lengths and constants, in order.

        Raises:
            NotEvaluable: see the class.
        """
        return self._cut(value).nodes

    def evaluable(self, value: ir.Value) -> bool:
        """True when ``value`` depends on lengths and constants alone."""
        try:
            self._cut(value)
        except NotEvaluable:
            return False
        return True

    def evaluate(self, value: ir.Value, sizes: Mapping[str, int]) -> np.ndarray:
        """The array that ``value`` holds at these sizes of the dynamic dims.

        Raises:
            NotEvaluable: see the class; also when the operators fail at these sizes.
            TooLarge: nothing is known at these sizes.
        """
        cut = self._cut(value)
        feeds = dict(cut.constants)
        for name, contents in cut.lengths.items():
            numbers = [self._shapes.normal(d).evaluate(sizes) for d in contents]
            feeds[name] = np.array(numbers, dtype=np.int64)
        if not cut.nodes:
            return np.asarray(feeds[str(value.name)])
        try:
            if cut.evaluator is None:
                cut.evaluator = ReferenceEvaluator(self._model(value, cut))
            with np.errstate(all="ignore"):
                return np.asarray(run_nodes(cut.evaluator, feeds, [str(value.name)], _refuse_large)[0])
        except TooLarge:
            raise
        except Exception as error:  # the reference evaluator raises whatever NumPy raises at sizes that do not fit
            raise NotEvaluable(f"{value.name}: {error}") from error

    def _cut(self, value: ir.Value) -> _Cut:
        if value not in self._cuts:
            try:
                self._cuts[value] = self._make_cut(value)
            except NotEvaluable as error:
                self._cuts[value] = error
        cut = self._cuts[value]
        if isinstance(cut, NotEvaluable):
            raise cut
        return cut

    def _make_cut(self, value: ir.Value) -> _Cut:
        cut = _Cut([], {}, {}, None)
        self._collect(value, cut)
        return cut

    def _collect(self, value: ir.Value, cut: _Cut) -> None:
        seen: set[ir.Value] = set()
        ordered: list[ir.Node] = []
        stack: list[tuple[ir.Value, bool]] = [(value, False)]
        while stack:
            current, done = stack.pop()
            producer = current.producer()
            if done:
                assert producer is not None
                if producer not in ordered:
                    ordered.append(producer)
                continue
            if current in seen or self._is_leaf(current, cut):
                seen.add(current)
                continue
            seen.add(current)
            if producer is None or not g.is_op(producer, *PURE_OPS) or len(seen) > MAX_NODES:
                raise NotEvaluable(str(current.name))
            stack.append((current, True))
            stack.extend((v, False) for v in producer.inputs if v is not None)
        cut.nodes = ordered

    def _is_leaf(self, value: ir.Value, cut: _Cut) -> bool:
        name = str(value.name)
        array = g.constant(value)
        if array is not None:
            cut.constants[name] = array
            return True
        producer = value.producer()
        contents = self._shapes.contents(value) if producer is not None else None
        shape = self._shapes.shape(value)
        if contents is not None and shape is not None and all(d.static is not None for d in (*contents, *shape)):
            # Picked out of a Shape beside dynamic dims, but none itself.
            dtype = self._shapes.dtype(value) or ir.DataType.INT64
            numbers = np.array([d.static for d in contents], dtype=dtype.numpy())
            if numbers.size == math.prod(d.static or 0 for d in shape):
                cut.constants[name] = numbers.reshape([d.static or 0 for d in shape])
                return True
        if g.is_op(producer, "Shape"):
            if contents is None or any(name.startswith("?") for dim in contents for name in dim.symbols):
                raise NotEvaluable(name)
            cut.lengths[name] = contents
            return True
        return False

    def _model(self, value: ir.Value, cut: _Cut) -> onnx.ModelProto:
        inputs = [onnx.helper.make_empty_tensor_value_info(n) for n in (*cut.constants, *cut.lengths)]
        output = onnx.helper.make_empty_tensor_value_info(str(value.name))
        nodes = [ir.to_proto(node) for node in cut.nodes]
        graph = onnx.helper.make_graph(nodes, "cut", inputs, [output])
        opsets = [onnx.helper.make_opsetid("", self._opset)]
        proto = onnx.ModelProto(ir_version=9, graph=graph)
        proto.opset_import.extend(opsets)
        return proto


def _refuse_large(node: Any, inputs: list[np.ndarray | None]) -> None:
    """What a mask allocates may depend on a number, so a node's inputs are looked at first."""
    if _elements(node.op_type, inputs) > MAX_ELEMENTS:
        raise TooLarge(f"{node.op_type} of {node.output[0]}")


def _elements(op_type: str, inputs: list[np.ndarray | None]) -> float:
    """At least how many elements the operator's result has."""
    arrays = [np.asarray(x) for x in inputs if x is not None]
    if op_type == "Range":
        start, limit, delta = (float(x.reshape(())) for x in arrays)
        return max(0.0, (limit - start) / delta) if delta else math.inf
    if op_type == "ConstantOfShape":
        return math.prod(float(n) for n in arrays[0].reshape(-1))
    if op_type == "Tile":
        return arrays[0].size * math.prod(float(n) for n in arrays[1].reshape(-1))
    if op_type == "Pad":
        return arrays[0].size + float(np.abs(arrays[1].astype(np.float64)).sum())
    shapes = [x.shape for x in arrays]
    if op_type == "Expand":
        shapes = [shapes[0], tuple(int(n) for n in arrays[1].reshape(-1))]
    elif op_type == "Gather":
        return arrays[1].size
    elif op_type in _NOT_BROADCAST:
        return 0
    rank = max((len(s) for s in shapes), default=0)
    aligned = [(1,) * (rank - len(s)) + s for s in shapes]
    return math.prod(float(max(sizes)) for sizes in zip(*aligned, strict=True))


_NOT_BROADCAST = ("Concat", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze", "Transpose", "Trilu", "Flatten")
"""Operators whose result is no larger than their inputs, which do not broadcast against one another."""
