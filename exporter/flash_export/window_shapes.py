# SPDX-License-Identifier: Apache-2.0
"""How long the output of a convolution or a pooling is: a quotient, equal to the one that a model computes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from flash_export import graph as g
from flash_export.dims import ONE, Dim, Shape

if TYPE_CHECKING:
    from flash_export.shapes import Shapes


def _window(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """``(length + pads - dilation * (kernel - 1) - 1) / stride + 1`` along each spatial axis, rounded down.

    Source: the ONNX operators' own text on ``auto_pad`` and ``ceil_mode``; rounding up is left to the file's shapes.
    A window longer than the padded input has no place in it. ONNX Runtime's Conv refuses it; its pooling divides
    towards zero, and makes one element where the formula says 0 for a window that is too long by less than a stride.
    """
    data, weight = s.shape(node.inputs[0]), s.shape(g.input_of(node, 1)) if node.op_type == "Conv" else None
    if data is None or len(data) < 3 or g.int_attribute(node, "ceil_mode", 0):
        return [None]
    channels = data[1] if node.op_type != "Conv" else None if weight is None else weight[0]
    rank = len(data) - 2
    kernel = g.ints_attribute(node, "kernel_shape") or [d.static or 0 for d in (weight or ())[2:]]
    strides = g.ints_attribute(node, "strides") or [1] * rank
    dilations = g.ints_attribute(node, "dilations") or [1] * rank
    pads = _pads(node, rank)
    if channels is None or pads is None or len(pads) != 2 * rank or min(kernel, default=0) < 1 or min(strides) < 1:
        return [None]
    if not len(kernel) == len(strides) == len(dilations) == rank:
        return [None]
    lengths = []
    for axis, size in enumerate(kernel):
        spare = pads[axis] + pads[axis + rank] - dilations[axis] * (size - 1) - 1
        lengths.append(s.quotient(data[axis + 2] + Dim.of(spare), strides[axis]) + ONE)
    return [(data[0], channels, *map(s.length, lengths))] * len(node.outputs)


def _pads(node: ir.Node, rank: int) -> list[int] | None:
    """Both ends' padding, all begins first; None where ``auto_pad`` makes the output as long as the strides say."""
    attribute = node.attributes.get("auto_pad")
    kind = "NOTSET" if attribute is None else attribute.as_string()
    if kind == "VALID":
        return [0] * 2 * rank
    return None if kind != "NOTSET" else g.ints_attribute(node, "pads") or [0] * 2 * rank


WINDOW_RULES: dict[str, Callable[[Shapes, ir.Node], list[Shape | None]]] = dict.fromkeys(
    ("Conv", "MaxPool", "AveragePool"), _window
)
