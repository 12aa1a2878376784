# SPDX-License-Identifier: Apache-2.0
"""What each operator makes of shapes.

A new operator is one function and one line in ``SHAPE_RULES``; an operator without a rule has the
shapes that the file or onnx's shape inference states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from flash_export import einsum
from flash_export import graph as g
from flash_export.contents_rules import places_of_slice, shape_contents
from flash_export.dims import ONE, Dim, Shape
from flash_export.window_shapes import WINDOW_RULES

if TYPE_CHECKING:
    from flash_export.shapes import Shapes

_UNARY_NAMES = (
    "Identity Cast Dropout Softmax LogSoftmax Tanh Sigmoid Relu Gelu Erf Sqrt Neg Abs Exp Not IsNaN Trilu "
    "CastLike LayerNormalization RMSNormalization Clip LeakyRelu Elu Softplus Reciprocal Log Sin Cos Floor "
    "Ceil CumSum Round Sign ScatterElements ScatterND HardSwish Mish Swish HardSigmoid "
    "SimplifiedLayerNormalization"
)
_UNARY = frozenset(_UNARY_NAMES.split())
_BROADCASTING_NAMES = "Add Sub Mul Div Pow Where And Or Xor Equal Less LessOrEqual Greater GreaterOrEqual Max Min Mod"
_BROADCASTING = frozenset(_BROADCASTING_NAMES.split())

# Shape rules: one function an operator (or family), from a node to its outputs' shapes.


def _same(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.shape(node.inputs[0])] * len(node.outputs)


def _broadcast(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.broadcast([s.shape(v) for v in node.inputs])]


def _matmul(s: Shapes, node: ir.Node) -> list[Shape | None]:
    a, b = s.shape(node.inputs[0]), s.shape(node.inputs[1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return [None]
    batch = s.broadcast([a[:-2], b[:-2]])
    return [None if batch is None else (*batch, a[-2], b[-1])]


def _gemm(s: Shapes, node: ir.Node) -> list[Shape | None]:
    a, b = s.shape(node.inputs[0]), s.shape(node.inputs[1])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return [None]
    rows = a[1] if g.int_attribute(node, "transA", 0) else a[0]
    return [(rows, b[0] if g.int_attribute(node, "transB", 0) else b[1])]


def _reduce(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape, axes = s.shape(node.inputs[0]), g.axes_of(node)
    if shape is None or (axes is None and len(node.inputs) > 1):
        return [None]
    at = set(range(len(shape))) if axes is None else {a % len(shape) for a in axes}
    kept = g.int_attribute(node, "keepdims", 1)
    return [tuple(ONE if i in at else d for i, d in enumerate(shape) if kept or i not in at)]


def _transpose(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape = s.shape(node.inputs[0])
    if shape is None:
        return [None]
    perm = g.ints_attribute(node, "perm") or list(range(len(shape)))[::-1]
    return [tuple(shape[i] for i in perm)]


def reshape_target(s: Shapes, node: ir.Node) -> Shape | None:
    """The output shape of a Reshape node with 0 and -1 resolved; None when it cannot be told."""
    shape, target = s.shape(node.inputs[0]), s.contents(g.input_of(node, 1))
    if target is None:
        return None
    dims: list[Dim | None] = []
    for axis, dim in enumerate(target):
        if dim.static == 0 and not g.int_attribute(node, "allowzero", 0):
            if shape is None or axis >= len(shape):
                return None
            dims.append(shape[axis])
        else:
            dims.append(None if dim.static == -1 else dim)
    if None not in dims:
        return tuple(d for d in dims if d is not None)
    if shape is None:
        return tuple(s.fresh() if d is None else d for d in dims)
    total = math.prod(shape, start=ONE)
    rest = total.divided(math.prod((d for d in dims if d is not None), start=ONE))
    return tuple((rest or s.fresh()) if d is None else d for d in dims)


def _reshape(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [reshape_target(s, node)]


def _flatten(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape = s.shape(node.inputs[0])
    if shape is None:
        return [None]
    axis = g.int_attribute(node, "axis", 1)
    axis += len(shape) if axis < 0 else 0
    return [(math.prod(shape[:axis], start=ONE), math.prod(shape[axis:], start=ONE))]


def _unsqueeze(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape, axes = s.shape(node.inputs[0]), g.axes_of(node)
    if shape is None or axes is None:
        return [None]
    rank = len(shape) + len(axes)
    at = {a % rank for a in axes}
    rest = iter(shape)
    return [tuple(ONE if i in at else next(rest) for i in range(rank))]


def _squeeze(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape, axes = s.shape(node.inputs[0]), g.axes_of(node)
    if shape is None:
        return [None]
    if axes is None:
        if len(node.inputs) > 1 or any(d.static is None for d in shape):
            return [None]
        return [tuple(d for d in shape if d != ONE)]
    at = {a % len(shape) for a in axes}
    return [tuple(d for i, d in enumerate(shape) if i not in at)]


def _expand(s: Shapes, node: ir.Node) -> list[Shape | None]:
    target = s.contents(node.inputs[1])
    if target is None:
        return [None]
    return [s.broadcast([s.shape(node.inputs[0]), tuple(ONE if d.static == -1 else d for d in target)])]


def _concat(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shapes = [s.shape(v) for v in node.inputs]
    known = [x for x in shapes if x is not None]
    if not known or len({len(x) for x in known}) != 1 or not known[0]:
        return [None]
    axis = g.int_attribute(node, "axis", 0) % len(known[0])
    # One input says what all have in common; only the length along the axis takes every one of them.
    total = sum((x[axis] for x in known), Dim({})) if len(known) == len(shapes) else s.fresh()
    return [tuple(total if i == axis else dim for i, dim in enumerate(known[0]))]


def _gather(s: Shapes, node: ir.Node) -> list[Shape | None]:
    data, indices = s.shape(node.inputs[0]), s.shape(node.inputs[1])
    if data is None or indices is None or not data:
        return [None]
    axis = g.int_attribute(node, "axis", 0) % len(data)
    return [data[:axis] + indices + data[axis + 1 :]]


def _gather_elements(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.shape(node.inputs[1])]


def _tile(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape, repeats = s.shape(node.inputs[0]), s.contents(node.inputs[1])
    if shape is None or repeats is None or len(shape) != len(repeats):
        return [None if shape is None else tuple(s.fresh() for _ in shape)]
    return [tuple(d * r for d, r in zip(shape, repeats, strict=True))]


def _slice(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape = s.shape(node.inputs[0])
    if shape is None:
        return [None]
    bounds = [s.contents(v) for v in node.inputs[1:5]]
    if len(node.inputs) == 1:  # up to opset 9
        written = (g.ints_attribute(node, name) for name in ("starts", "ends", "axes"))
        bounds = [tuple(map(Dim.of, numbers)) for numbers in written if numbers is not None]
    if len(bounds) < 2:
        return [None]
    starts, ends = bounds[0], bounds[1]
    axes = bounds[2] if len(bounds) > 2 else tuple(Dim.of(i) for i in range(len(starts or ())))
    steps = bounds[3] if len(bounds) > 3 else tuple(ONE for _ in starts or ())
    if axes is None:
        return [tuple(s.fresh() for _ in shape)]
    dims = list(shape)
    for i, axis in enumerate(axes):
        at = (axis.static or 0) % len(shape)
        known = starts is not None and ends is not None and steps is not None
        dims[at] = _sliced(shape[at], starts[i], ends[i], steps[i]) if known else None  # type: ignore
    return [tuple(s.fresh() if d is None else d for d in dims)]


def _sliced(dim: Dim, start: Dim, end: Dim, step: Dim) -> Dim | None:
    first, last, stride = start.static, end.static, step.static
    if dim.static is not None and first is not None and last is not None and stride is not None:
        places = places_of_slice(dim.static, first, last, stride)
        return None if places is None else Dim.of(len(places))
    if stride == 1 and first == 0 and last is not None and last >= 2**31 - 1:
        return dim
    if stride == 1 and first == 0 and last is None:
        return end  # a slice past the end is shorter than it asks for; programs do not mean that
    if stride == 1 and first is not None and last is not None:
        return _part(dim, first, last)
    return None


def _part(dim: Dim, first: int, last: int) -> Dim | None:
    """The length of ``[first:last]`` of a dynamic dim, where it is the same at every length.

    One element is taken to be there: products broadcast it, as they do the first of a batch. More are where the dim
    has a constant part that is as long.
    """
    if first < 0 and last >= 2**31 - 1:
        last = 0  # both are counted from the end
    elif (first < 0) != (last < 0):
        return None
    length, reach = last - first, -first if first < 0 else last
    least = dim.terms.get((), 0) if all(c > 0 for c in dim.terms.values()) else 0
    return Dim.of(length) if length == 1 or (length > 1 and reach <= least) else None


def _pad(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """Each axis grows by what its two ends are padded with; a negative number of elements is cut off."""
    shape, pads = s.shape(node.inputs[0]), s.contents(g.input_of(node, 1))
    written = g.ints_attribute(node, "pads")  # up to opset 10
    if written is not None:
        pads = tuple(map(Dim.of, written))
    if shape is None:
        return [None]
    chosen = g.input_of(node, 3)
    axes = tuple(Dim.of(i) for i in range(len(shape))) if chosen is None else s.contents(chosen)
    if pads is None or axes is None or len(pads) != 2 * len(axes):
        return [tuple(s.fresh() for _ in shape)]
    dims: list[Dim] = list(shape)
    for axis, begin, end in zip(axes, pads, pads[len(axes) :], strict=False):
        at = (axis.static or 0) % len(shape)
        dims[at] = s.length(dims[at] + begin + end)
    return [tuple(dims)]


def _split(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape = s.shape(node.inputs[0])
    sizes = s.contents(g.input_of(node, 1))
    written = g.ints_attribute(node, "split")
    if shape is None:
        return [None] * len(node.outputs)
    axis = g.int_attribute(node, "axis", 0) % len(shape)
    if sizes is None and written is not None:
        sizes = tuple(Dim.of(i) for i in written)
    if sizes is None:
        part = shape[axis].divided(Dim.of(len(node.outputs)))
        sizes = tuple(part or s.fresh() for _ in node.outputs)
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def _shape_of(s: Shapes, node: ir.Node) -> list[Shape | None]:
    contents = shape_contents(s, node)
    return [None if contents is None else (Dim.of(len(contents)),)]


def _constant_of_shape(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.contents(node.inputs[0])]


def _constant(s: Shapes, node: ir.Node) -> list[Shape | None]:
    array = g.constant(node.outputs[0])
    return [None if array is None else tuple(Dim.of(i) for i in array.shape)]


def _range(s: Shapes, node: ir.Node) -> list[Shape | None]:
    start, limit, delta = (s.contents(v) for v in node.inputs)
    if start is not None and limit is not None and delta is not None and delta[0] == ONE:
        return [(limit[0] - start[0],)]
    return [(s.fresh(),)]


def _einsum(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shapes = [s.shape(value) for value in node.inputs]
    letters = einsum.letters(node, [None if shape is None else len(shape) for shape in shapes])
    if letters is None:
        return [None]
    dims: dict[str, Dim] = {}
    for names, shape in zip(letters[0], shapes, strict=True):
        for name, dim in zip(names, shape or (), strict=True):
            dims[name] = dim if dims.get(name, ONE) == ONE else dims[name]
    return [tuple(dims[name] for name in letters[1])]


SHAPE_RULES: dict[str, Callable[[Shapes, ir.Node], list[Shape | None]]] = {
    **dict.fromkeys(_UNARY, _same),
    **dict.fromkeys(_BROADCASTING, _broadcast),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), _reduce),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": _expand,
    "Concat": _concat,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Tile": _tile,
    "Slice": _slice,
    "Pad": _pad,
    "Split": _split,
    "Shape": _shape_of,
    "ConstantOfShape": _constant_of_shape,
    "Constant": _constant,
    "Range": _range,
    "Einsum": _einsum,
    **WINDOW_RULES,
}
