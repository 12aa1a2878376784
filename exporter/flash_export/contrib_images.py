# SPDX-License-Identifier: Apache-2.0
"""Operators of ONNX Runtime's diffusion models, with the channels last, that have kernels on GPUs alone, written out.

Each as the operator's text defines it (docs/ContribOperators.md of ONNX Runtime), in float32 as the kernels compute,
and in operators that are the same at every opset from 13 on.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export import graph as g

_TO_CHANNELS_FIRST, _TO_CHANNELS_LAST = [0, 3, 1, 2], [0, 2, 3, 1]


class Nodes:
    """Nodes written one after the other; ``op`` gives the value that the last one makes."""

    def __init__(self) -> None:
        self.made: list[ir.Node] = []

    def op(self, name: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        """Appends a standard operator."""
        self.made.append(ir.node(name, inputs, attributes))  # type: ignore[arg-type]
        return self.made[-1].outputs[0]

    def constant(self, content: object, dtype: type = np.float32) -> ir.Value:
        """Appends a constant."""
        return self.op("Constant", value=ir.tensor(np.array(content, dtype)))

    def wide(self, value: ir.Value) -> ir.Value:
        """``value`` in float32: weights of these operators may have another type than what they are applied to."""
        return self.op("Cast", value, to=int(ir.DataType.FLOAT))


def group_norm(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value]]:
    """Normalises the channels of each group together; ``SkipGroupNorm`` what is added to them before."""
    n = Nodes()
    x, gamma, beta = (n.wide(v) for v in node.inputs[:3] if v is not None)
    skip, bias = g.input_of(node, 3), g.input_of(node, 4)
    if skip is not None:
        if skip.shape is not None and len(skip.shape) == 2:
            skip = n.op("Reshape", skip, n.constant([0, 1, 1, -1], np.int64))
        x = n.op("Add", x, n.wide(skip))
    total = x = x if bias is None else n.op("Add", x, n.wide(bias))
    last = bool(g.int_attribute(node, "channels_last", 1))
    if last:
        x = n.op("Transpose", x, perm=_TO_CHANNELS_FIRST)
    y = n.op("Reshape", _normalised(n, x, node), n.op("Shape", x))
    if last:
        y = n.op("Transpose", y, perm=_TO_CHANNELS_LAST)
    else:
        gamma, beta = (n.op("Reshape", v, n.constant([-1, 1, 1], np.int64)) for v in (gamma, beta))
    y = n.op("Add", n.op("Mul", y, gamma), beta)
    if g.int_attribute(node, "activation", 0):
        y = n.op("Mul", y, n.op("Sigmoid", y))
    return n.made, [y, total]


def _normalised(n: Nodes, x: ir.Value, node: ir.Node) -> ir.Value:
    """Each group of channels less its mean, over its deviation: ``[N, groups, the rest]``."""
    epsilon = node.attributes.get("epsilon")
    flat = n.op("Reshape", x, n.constant([0, g.int_attribute(node, "groups", 1), -1], np.int64))
    length = n.wide(n.op("Gather", n.op("Shape", flat), n.constant(2, np.int64)))
    axis = n.constant([2], np.int64)
    apart = n.op("Sub", flat, n.op("Div", n.op("ReduceSum", flat, axis), length))
    variance = n.op("Div", n.op("ReduceSum", n.op("Mul", apart, apart), axis), length)
    least = n.constant(1e-5 if epsilon is None else epsilon.as_float())
    return n.op("Div", apart, n.op("Sqrt", n.op("Add", variance, least)))


def nhwc_conv(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value]]:
    """A convolution of ``[N, H, W, C]`` by ``[M, kH, kW, C / group]``."""
    n = Nodes()
    x, weight = (n.op("Transpose", n.wide(v), perm=_TO_CHANNELS_FIRST) for v in node.inputs[:2] if v is not None)
    bias = g.input_of(node, 2)
    operands = [x, weight] if bias is None else [x, weight, n.wide(bias)]
    n.made.append(ir.Node("", "Conv", operands, list(node.attributes.values())))
    return n.made, [n.op("Transpose", n.made[-1].outputs[0], perm=_TO_CHANNELS_LAST)]


def bias_split_gelu(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value]]:
    """The left half of ``X + bias`` times the Gelu of the right half."""
    n = Nodes()
    x, bias = (n.wide(v) for v in node.inputs[:2] if v is not None)
    halves = n.op("Reshape", n.op("Add", x, bias), n.constant([0, 0, 2, -1], np.int64))
    left, right = (n.op("Gather", halves, n.constant(i, np.int64), axis=2) for i in (0, 1))
    above = n.op("Add", n.op("Erf", n.op("Mul", right, n.constant(0.5**0.5))), n.constant(1.0))
    return n.made, [n.op("Mul", left, n.op("Mul", n.op("Mul", right, n.constant(0.5)), above))]


def bias_add(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value]]:
    """``X + bias + skip``."""
    n = Nodes()
    x, bias, skip = (n.wide(v) for v in node.inputs[:3] if v is not None)
    return n.made, [n.op("Add", n.op("Add", x, bias), skip)]
