# SPDX-License-Identifier: Apache-2.0
"""Writes the nodes of one ONNX function, hiding what changed between opset 11 and the newest.

Only what ``function_body`` needs is here. Literals are 0-d or 1-d constants; an operator's attribute becomes a
constant that refers to the attribute of the calling node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

AXES_BECAME_INPUTS = {"ReduceSum": 13, "ReduceMax": 18}
"""Since which opset a reduction takes its axes as an input."""
CONSTANT_TAKES_NUMBERS = 12
"""Since which opset ``Constant`` has value_int and value_float, so that an attribute can become a tensor."""


class FunctionBuilder:
    """Appends nodes to ``nodes``, each value named after what it is. Constants and shapes are written once.

    Args:
        opset: of the default domain; 11 or newer.
        fixed: attributes that every calling node gives the same value; used only where the opset has no way to
            turn an attribute of the node into a tensor.
    """

    def __init__(self, opset: int, fixed: Mapping[str, int | float]) -> None:
        self.opset = opset
        self.nodes: list[ir.Node] = []
        self._fixed = fixed
        self._attributes: dict[str, ir.Value] = {}
        self._literals: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._shapes: dict[ir.Value, ir.Value] = {}
        self._one_dimensional: dict[ir.Value, ir.Value] = {}
        self._names: dict[str, int] = {}

    def op(self, op_type: str, name: str, *inputs: ir.Value, **attributes: int | list[int]) -> ir.Value:
        """One node of the default domain with one output called ``name`` (numbered when taken)."""
        given = [
            ir.AttrInt64s(key, value) if isinstance(value, list) else ir.AttrInt64(key, value)
            for key, value in attributes.items()
        ]
        return self._append(op_type, name, inputs, given)

    def ints(self, name: str, value: int | list[int]) -> ir.Value:
        """An int64 literal: 0-d from an int, 1-d from a list."""
        return self._literal(name, np.array(value, np.int64))

    def number(self, name: str, value: float) -> ir.Value:
        """An fp32 literal, 0-d."""
        return self._literal(name, np.array(value, np.float32))

    def int_attribute(self, name: str) -> ir.Value:
        """The calling node's INT attribute as a 0-d int64 tensor."""
        return self._attribute(name, "value_int", ir.AttributeType.INT)

    def float_attribute(self, name: str) -> ir.Value:
        """The calling node's FLOAT attribute as a 0-d fp32 tensor."""
        return self._attribute(name, "value_float", ir.AttributeType.FLOAT)

    def flag(self, name: str) -> ir.Value:
        """The calling node's 0-or-1 attribute as a 0-d bool tensor."""
        return self.op("Cast", f"{name}_on", self.int_attribute(name), to=int(ir.DataType.BOOL))

    def dim(self, name: str, x: ir.Value, axis: int | list[int]) -> ir.Value:
        """The size of one axis, int64: 0-d, or 1-d when the axis is given as a list."""
        return self.op("Gather", name, self.shape_of(x), self.ints("axis", axis), axis=0)

    def shape_of(self, x: ir.Value) -> ir.Value:
        """All sizes, 1-d int64."""
        if x not in self._shapes:
            self._shapes[x] = self.op("Shape", f"shape_of_{x.name}", x)
        return self._shapes[x]

    def count(self, name: str, end: ir.Value) -> ir.Value:
        """0, 1 … end - 1 as 1-d int64."""
        return self.op("Range", name, self.ints("zero", 0), end, self.ints("one", 1))

    def reshape(self, name: str, x: ir.Value, shape: list[int]) -> ir.Value:
        """To a fixed shape; 0 copies the axis of the input, -1 takes what is left."""
        return self.op("Reshape", name, x, self.ints("shape", shape))

    def one(self, size: ir.Value) -> ir.Value:
        """A 0-d number as 1-d, for ``concat``."""
        if size not in self._one_dimensional:
            self._one_dimensional[size] = self.reshape(f"{size.name}_1d", size, [1])
        return self._one_dimensional[size]

    def concat(self, name: str, *parts: ir.Value) -> ir.Value:
        """1-d tensors in a row."""
        return self.op("Concat", name, *parts, axis=0)

    def first_of_last(self, name: str, x: ir.Value) -> ir.Value:
        """The last axis cut to its first element, its rank kept."""
        begin, end, axis = self.ints("begin", [0]), self.ints("end", [1]), self.ints("last_axis", [-1])
        return self.op("Slice", name, x, begin, end, axis)

    def reduce_last(self, op_type: str, name: str, x: ir.Value) -> ir.Value:
        """ReduceMax or ReduceSum over the last axis, which stays with size 1."""
        if self.opset < AXES_BECAME_INPUTS[op_type]:
            return self.op(op_type, name, x, axes=[-1], keepdims=1)
        return self.op(op_type, name, x, self.ints("last_axis", [-1]), keepdims=1)

    def _attribute(self, name: str, field: str, kind: ir.AttributeType) -> ir.Value:
        if name not in self._attributes:
            if self.opset >= CONSTANT_TAKES_NUMBERS:
                value = self._append("Constant", name, (), [ir.RefAttr(field, name, kind)])
            else:
                dtype = np.int64 if kind == ir.AttributeType.INT else np.float32
                value = self._literal(name, np.array(self._fixed[name], dtype))
            self._attributes[name] = value
        return self._attributes[name]

    def _literal(self, name: str, array: np.ndarray) -> ir.Value:
        """The constant, the same one when its number was asked for before."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._literals:
            self._literals[key] = self._append("Constant", name, (), [ir.AttrTensor("value", ir.tensor(array))])
        return self._literals[key]

    def _append(self, op_type: str, name: str, inputs: Sequence[ir.Value], attributes: list[ir.Attr]) -> ir.Value:
        number = self._names[name] = self._names.get(name, -1) + 1
        unique = f"{name}_{number}" if number else name
        node = ir.Node("", op_type, inputs, attributes, name=unique, outputs=[ir.Value(name=unique)])
        self.nodes.append(node)
        return node.outputs[0]
