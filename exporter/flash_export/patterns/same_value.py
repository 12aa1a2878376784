# SPDX-License-Identifier: Apache-2.0
"""Whether two values of a graph are one and the same, as a mask is that a program computes twice."""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.evaluate import PURE_OPS

DEEP = 8
"""Operators above two values that are compared."""


def same_value(a: ir.Value, b: ir.Value, depth: int = DEEP) -> bool:
    """Whether two values are made in the same way from the same values."""
    if a is b:
        return True
    x, y = g.constant(a), g.constant(b)
    if x is not None and y is not None:
        return x.dtype == y.dtype and x.shape == y.shape and bool((x == y).all())
    one, two = a.producer(), b.producer()
    if one is None or two is None or not depth or one.op_identifier() != two.op_identifier():
        return False
    if one.outputs.index(a) != two.outputs.index(b) or len(one.inputs) != len(two.inputs):
        return False
    if not g.is_op(one, *PURE_OPS) or _told(one) != _told(two):
        return False
    pairs = zip(one.inputs, two.inputs, strict=True)
    return all(u is v or (u is not None and v is not None and same_value(u, v, depth - 1)) for u, v in pairs)


def _told(node: ir.Node) -> list[tuple[str, object]]:
    """Attributes that are numbers or lists of them; a tensor or a graph equals itself alone."""
    plain = {name: a.value for name, a in node.attributes.items()}
    return sorted((n, v if isinstance(v, (int, float, str)) else repr(v)) for n, v in plain.items())
