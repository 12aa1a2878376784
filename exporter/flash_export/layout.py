# SPDX-License-Identifier: Apache-2.0
"""Layout operators read as what they do to axes, so that Q, K, V, scores and masks can be followed through them.

An axis is a list of *atoms* (independent lengths, outermost first); an axis of length 1 is the empty list. Transpose
permutes axes, Reshape regroups and splits atoms, Expand adds atoms that hold no data of their own. Two tensors that
meet in a product have their atoms unified. Whatever sequence of layout operators an exporter chose, the question
"is this value ``[B, S, H*D]``?" is then a comparison of lists.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from flash_export import graph as g
from flash_export.dims import ONE, Dim
from flash_export.drafts import is_draft
from flash_export.shape_rules import reshape_target
from flash_export.shapes import Shapes

Source = tuple[ir.Value, int, int]


class Atom:
    """One independent length. Splitting or unifying replaces it by ``parts``; ask ``leaves`` for what is left.

    ``source`` says where it is to be had at run time: a value of the graph, its axis, and what that is larger by.
    """

    __slots__ = ("parts", "size", "source")

    def __init__(self, size: Dim, source: Source | None = None) -> None:
        self.size = size
        self.source = source
        self.parts: tuple[Atom, ...] | None = None

    def __repr__(self) -> str:
        return f"{self.size}" if self.parts is None else repr(self.parts)


Axis = list[Atom]
Axes = list[Axis]
Scalar = Callable[[ir.Value | None], float | None]
"""Reads the one number that a value holds, or None."""


def leaves(atoms: Iterable[Atom]) -> Axis:
    """The atoms with every replaced one spelled out."""
    result: Axis = []
    for atom in atoms:
        result.extend([atom] if atom.parts is None else leaves(atom.parts))
    return result


def fresh_axes(shape: Sequence[Dim]) -> Axes:
    """One new atom an axis, none where the length is 1."""
    return [[] if dim == ONE else [Atom(dim)] for dim in shape]


def size_of(axis: Iterable[Atom]) -> Dim:
    """The length of an axis."""
    return math.prod((a.size for a in leaves(axis)), start=ONE)


def unify(a: Axis, b: Axis, shapes: Shapes) -> bool:
    """Makes the atoms of two axes of one length the same; False when their factors cannot be matched."""
    left, right = leaves(a), leaves(b)
    while left and right:
        x, y = left[0], right[0]
        if x is y:
            left, right = left[1:], right[1:]
            continue
        single = len(left) == len(right) == 1
        if shapes.normal(x.size) == shapes.normal(y.size) or (single and _may_be_equal(x.size, y.size)):
            _merge(x, y, shapes)
        elif not (_split(x, y.size) or _split(y, x.size)):
            return False
        left, right = leaves(left), leaves(right)
    return not left and not right


def _may_be_equal(x: Dim, y: Dim) -> bool:
    return x.static is None or y.static is None


def _merge(x: Atom, y: Atom, shapes: Shapes) -> None:
    shapes.unify(x.size, y.size)
    if x.size.static is None and y.size.static is not None:
        x.size = y.size
    x.source = x.source or y.source
    y.parts = (x,)


def _split(atom: Atom, outer: Dim) -> bool:
    inner = atom.size.divided(outer)
    if inner is None or inner == ONE or outer == ONE:
        return False
    atom.parts = (Atom(outer, _of_part(atom, inner)), Atom(inner, _of_part(atom, outer)))
    return True


def _of_part(atom: Atom, other: Dim) -> Source | None:
    """Where a part is to be had whose other part is ``other``."""
    if atom.source is None or other.static is None:
        return None
    value, axis, times = atom.source
    return value, axis, times * other.static


@dataclasses.dataclass(slots=True)
class Chain:
    """A value followed upwards through layout operators (and scalar factors) to its source.

    ``values[0]`` is the source, ``values[-1]`` the value asked for; ``nodes[i]`` makes ``values[i + 1]`` of
    ``values[i]``, multiplied by ``factors[i]``. ``axes[i]`` are the axes of ``values[i]``; ``expanded`` are atoms that
    an Expand added.
    """

    values: list[ir.Value]
    nodes: list[ir.Node]
    axes: list[Axes]
    factors: list[float]
    expanded: list[Atom]

    @property
    def last(self) -> Axes:
        """The axes of the value asked for."""
        return self.axes[-1]

    def factor_below(self, index: int) -> float:
        """What ``values[index]`` is multiplied by on its way down."""
        return math.prod(self.factors[index:])

    def data_atoms(self) -> list[Atom]:
        """The atoms that hold data: all but those of an Expand."""
        hidden = {id(a) for a in leaves(self.expanded)}
        return [a for axis in self.last for a in leaves(axis) if id(a) not in hidden]


def follow(value: ir.Value, shapes: Shapes, *, scalar: Scalar | None) -> Chain | None:
    """Follows ``value`` up to the topmost source whose path down to it is understood; None without a known rank.

    Casts between float types are part of the path; whoever picks a value of the chain minds its type.

    Args:
        value: where to start.
        shapes: symbolic shapes of the graph.
        scalar: reads the number that a value holds; with it, Mul and Div by a number are part of the path.
    """
    path: list[tuple[ir.Node, float]] = []
    top = value
    while (above := _step_up(top, shapes, scalar)) is not None:
        node, top, factor = above
        path.append((node, factor))
    path.reverse()
    chain = _start(top, shapes)
    for node, factor in path:
        following = None if chain is None else _step_down(node, chain, shapes)
        if chain is None or following is None:
            chain = _start(node.outputs[0], shapes)
            continue
        chain.values.append(node.outputs[0])
        chain.nodes.append(node)
        chain.axes.append(following)
        chain.factors.append(factor)
    return chain


def _start(value: ir.Value, shapes: Shapes) -> Chain | None:
    shape = shapes.shape(value)
    if shape is None:
        return None
    axes = fresh_axes(shape)
    if not is_draft(value):
        for index, axis in enumerate(axes):
            for atom in axis:
                atom.source = value, index, 1
    return Chain([value], [], [axes], [], [])


LAYOUT_OPS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout", "Expand", "Tile")


def _step_up(value: ir.Value, shapes: Shapes, scalar: Scalar | None) -> tuple[ir.Node, ir.Value, float] | None:
    node = value.producer()
    if node is None or value is not node.outputs[0] or not node.inputs or node.inputs[0] is None:
        return None
    if g.is_op(node, *LAYOUT_OPS):
        return None if trains(node) else (node, node.inputs[0], 1.0)
    if is_float_cast(node, shapes):
        return node, node.inputs[0], 1.0
    if scalar is not None and g.is_op(node, "Mul", "Div"):
        scaled = read_scalar_factor(node, shapes, scalar)
        return None if scaled is None else (node, *scaled)
    return None


def trains(node: ir.Node) -> bool:
    """True for a Dropout that really drops: its training_mode input is not a constant false."""
    if node.op_type != "Dropout":
        return False
    mode = g.input_of(node, 2)
    if mode is None:
        return False
    array = g.constant(mode)
    return array is None or bool(array.reshape(-1)[0])


FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def is_float_cast(node: ir.Node | None, shapes: Shapes) -> bool:
    """True for a Cast from one float type to another."""
    if node is None or not g.is_op(node, "Cast"):
        return False
    return shapes.dtype(node.inputs[0]) in FLOATS and g.int_attribute(node, "to", 0) in FLOATS


def read_scalar_factor(node: ir.Node, shapes: Shapes, scalar: Scalar) -> tuple[ir.Value, float] | None:
    """The tensor operand of a Mul or Div and what it is multiplied by; None when no operand is a known number."""
    a, b = node.inputs[0], node.inputs[1]
    if a is None or b is None:
        return None
    number = scalar(b)
    if number is not None and _rank_fits(b, a, shapes):
        if node.op_type == "Mul":
            return a, number
        return None if number == 0 else (a, 1.0 / number)
    number = scalar(a)
    if number is not None and node.op_type == "Mul" and _rank_fits(a, b, shapes):
        return b, number
    return None


def _rank_fits(number: ir.Value, tensor: ir.Value, shapes: Shapes) -> bool:
    """A one-element tensor must not add axes to the other operand."""
    small, large = shapes.shape(number), shapes.shape(tensor)
    return small is not None and (len(small) <= 1 or (large is not None and len(small) <= len(large)))


def _step_down(node: ir.Node, chain: Chain, shapes: Shapes) -> Axes | None:
    if node.op_type == "Expand" or (node.op_type == "Tile" and _repeats_only_ones(node, shapes)):
        return _expand(chain, shapes.shape(node.outputs[0]))
    return step(node, chain.last, shapes)


def _repeats_only_ones(node: ir.Node, shapes: Shapes) -> bool:
    """Whether a Tile repeats axes of length 1 alone, as an Expand does."""
    before, after = shapes.shape(node.inputs[0]), shapes.shape(node.outputs[0])
    return (
        before is not None
        and after is not None
        and all(old in (ONE, new) for old, new in zip(before, after, strict=True))
    )


def step(node: ir.Node, axes: Axes, shapes: Shapes) -> Axes | None:
    """The axes after a layout operator that neither drops nor adds data; None when that cannot be shown."""
    if node.op_type == "Transpose":
        perm = g.ints_attribute(node, "perm") or list(range(len(axes)))[::-1]
        return [axes[i] for i in perm]
    if node.op_type == "Unsqueeze":
        return _unsqueeze(axes, g.axes_of(node))
    if node.op_type == "Squeeze":
        return _squeeze(node, axes)
    if node.op_type == "Reshape":
        target = reshape_target(shapes, node)
        return None if target is None else regroup(axes, target)
    if node.op_type == "Flatten":
        shape = shapes.shape(node.outputs[0])
        return None if shape is None else regroup(axes, shape)
    if node.op_type in ("Identity", "Dropout", "Cast", "Mul", "Div"):
        return axes
    return None


def _unsqueeze(axes: Axes, at: list[int] | None) -> Axes | None:
    if at is None:
        return None
    rank = len(axes) + len(at)
    new = {i % rank for i in at}
    rest = iter(axes)
    return [[] if i in new else next(rest) for i in range(rank)]


def _squeeze(node: ir.Node, axes: Axes) -> Axes | None:
    at = g.axes_of(node)
    if at is None:
        return None if len(node.inputs) > 1 else [a for a in axes if leaves(a)]
    gone = {i % len(axes) for i in at}
    # A squeezed axis has length 1; an atom there is a dynamic length that must be 1, about which nothing is known.
    return None if any(leaves(axes[i]) for i in gone) else [a for i, a in enumerate(axes) if i not in gone]


def regroup(axes: Axes, target: Sequence[Dim]) -> Axes | None:
    """A Reshape: the atoms in order, dealt into axes of the target lengths, split where a target asks for a factor."""
    rest = [a for axis in axes for a in leaves(axis)]
    result: Axes = []
    for length in target:
        group: Axis = []
        missing = length
        while missing != ONE:
            if not rest:
                return None
            quotient = missing.divided(rest[0].size)
            if quotient is None:
                if not _split(rest[0], missing):
                    return None
                rest = leaves(rest)
                continue
            group.append(rest.pop(0))
            missing = quotient
        result.append(group)
    return None if rest else result


def _expand(chain: Chain, shape: Sequence[Dim] | None) -> Axes | None:
    if shape is None or len(shape) < len(chain.last):
        return None
    padded: Axes = [[] for _ in range(len(shape) - len(chain.last))] + chain.last
    result: Axes = []
    for axis, dim in zip(padded, shape, strict=True):
        if leaves(axis) or dim == ONE:
            result.append(axis)
            continue
        atom = Atom(dim)
        chain.expanded.append(atom)
        result.append([atom])
    return result
