# SPDX-License-Identifier: Apache-2.0
"""Nodes that a reader writes down before it is known whether its site is rewritten; they lie in no graph until then.

An operator that holds more than attention (a cache, a projection, a rotation of its own) is read as standard
operators around the attention. ``rewrite`` puts those that a plan needs into the graph; a refused site leaves none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export.op import DOMAIN
from flash_export.shapes import Shapes


def is_draft(value: ir.Value) -> bool:
    """True for an output of a node that lies in no graph yet."""
    node = value.producer()
    return node is not None and node.graph is None


def is_loose_constant(value: ir.Value) -> bool:
    """True for a constant that a draft reads and no graph owns yet."""
    return value.producer() is None and value.const_value is not None and value.graph is None


class Drafts:
    """Writes nodes for one anchor after another and knows how to take an anchor's back."""

    def __init__(self, shapes: Shapes, opset: int) -> None:
        self._shapes = shapes
        self._opset = opset
        self._nodes: list[ir.Node] = []
        self._count = 0

    def op(self, operator: str, *inputs: ir.Value | None, **attributes: int | float | list[int]) -> ir.Value:
        """The one output of a new standard node."""
        node = ir.node(operator, list(inputs), attributes)
        self._count += 1
        node.outputs[0].name = f"{DOMAIN}/draft_{self._count}"
        self._nodes.append(node)
        self._shapes.add(node)
        dtype = self._shapes.dtype(node.outputs[0])
        node.outputs[0].type = None if dtype is None else ir.TensorType(dtype)
        return node.outputs[0]

    def numbers(self, *values: int) -> ir.Value:
        """A constant int64 vector."""
        return self.constant(np.array(values, dtype=np.int64))

    def constant(self, array: np.ndarray) -> ir.Value:
        """A constant tensor."""
        tensor = ir.tensor(array)
        self._count += 1
        value = ir.Value(name=f"{DOMAIN}/draft_{self._count}", const_value=tensor)
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
        return value

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """``value`` with new axes of length 1."""
        if self._opset < 13:
            return self.op("Unsqueeze", value, axes=list(axes))
        return self.op("Unsqueeze", value, self.numbers(*axes))

    def squeeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """``value`` without the axes of length 1."""
        if self._opset < 13:
            return self.op("Squeeze", value, axes=list(axes))
        return self.op("Squeeze", value, self.numbers(*axes))

    def slice(self, value: ir.Value, axis: int, start: int, stop: int) -> ir.Value:
        """Elements ``start`` to ``stop`` of an axis."""
        return self.op("Slice", value, self.numbers(start), self.numbers(stop), self.numbers(axis))

    def reshape(self, value: ir.Value, *target: int) -> ir.Value:
        """``value`` with the axes of ``target``, in which 0 copies a length."""
        return self.op("Reshape", value, self.numbers(*target))

    def mark(self) -> int:
        """Where the next anchor's nodes begin."""
        return len(self._nodes)

    def discard(self, mark: int) -> None:
        """Takes the nodes since ``mark`` back, so that no value of the graph counts them as its readers."""
        for node in reversed(self._nodes[mark:]):
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
        del self._nodes[mark:]
