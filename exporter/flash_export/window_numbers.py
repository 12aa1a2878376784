# SPDX-License-Identifier: Apache-2.0
"""The numbers that may be sizes of windows: whole constants that a model's masks by positions are made with.

A window is no operator of ONNX. Models write it as ``j > i - 200``, as a triangle whose diagonal is moved by 200, as a
triangle that is padded or cut by 200, as positions that start at 200, or as chunks of 200. Operators of other domains
have it as an attribute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from flash_export.twin import is_float

_ON_TWO = frozenset(("Add", "Sub", "Sum", "Div", "Mod", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"))
"""What combines positions with a number, on either side."""

_NUMBERS_OF = {
    "Trilu": (1,),
    "Range": (0,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Pad": (1,),
    "Slice": (1, 2),
}
"""Operator -> the inputs that a window's size can be in: a diagonal, a start, a shape, widths, cuts."""

_OF_POSITIONS_ALONE = frozenset(("Expand", "Pad", "Slice"))
"""Their numbers count where their data is made of positions: features are cut and padded too."""

_MAKE_POSITIONS = frozenset(("Shape", "Size", "Range", "ConstantOfShape"))

_KEEP_NUMBERS = frozenset(("Neg", "Abs", "Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Concat"))

_WINDOWS = frozenset(("local_window_size", "window_left", "window_right"))
"""Attributes of other domains' operators: of ONNX Runtime's, which count a row's own key, and of ours, which do not."""

_MOST_NUMBERS = 256
"""In a constant: a window for each head, or the widths of a tensor of rank 8."""

_TRIED = 16
"""Numbers of one constant, the largest."""

_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Abs": np.abs,
    "Identity": np.asarray,
    "Unsqueeze": lambda data, *_: data,  # numbers count here, not their shape
    "Squeeze": lambda data, *_: data,
}
"""What constants are computed from others with."""

_Constants = dict[ir.Value, np.ndarray]
"""Small constants, those that are computed from others included."""


def numbers_on_positions(model: ir.Model) -> dict[int, str]:
    """Each number without its sign -> the first node that takes it, by its name or that of its output.

    Those of branches, loops and functions count too. Floats count where the other side is made of positions: integers
    are seldom anything else.
    """
    found: dict[int, str] = {}
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        every = list(ir.traversal.RecursiveGraphIterator(body))
        constants = _constants(every)
        positions = _positions(every, constants)
        for node in every:
            for number in _numbers_of(node, positions, constants):
                found.setdefault(number, node.name or node.outputs[0].name or node.op_type)
    return found


def _numbers_of(node: ir.Node, positions: set[ir.Value], constants: _Constants) -> Iterator[int]:
    if node.domain != "":
        for name in _WINDOWS & node.attributes.keys():
            attribute = node.attributes[name]
            if attribute.type == ir.AttributeType.INT and not attribute.is_ref() and attribute.as_int() >= 0:
                yield from (attribute.as_int(), attribute.as_int() + 1)  # keys of a row, or only those before its own
        return
    if node.op_type in _ON_TWO:
        if all(value is not None and _is_constant(value, constants) for value in node.inputs):
            return  # arithmetic on the model's own sizes
        of_positions = any(value in positions for value in node.inputs)
        for value in node.inputs:
            most = _MOST_NUMBERS if of_positions else 1
            yield from _whole(value, constants, most=most, floats=of_positions)
    elif node.op_type not in _OF_POSITIONS_ALONE or (node.inputs and node.inputs[0] in positions):
        for index in _NUMBERS_OF.get(node.op_type, ()):
            if index < len(node.inputs):
                yield from _whole(node.inputs[index], constants, most=_MOST_NUMBERS, floats=False)


def _whole(value: ir.Value | None, constants: _Constants, *, most: int, floats: bool) -> Iterator[int]:
    """The whole numbers, without their signs, in a constant or in what is put together from constants.

    Of a number between two whole ones, as in i - j < 299.5, both.
    """
    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        producer = one.producer()
        if one in constants:
            numbers = constants[one]
            if numbers.size <= most and (numbers.dtype.kind in "iu" or (floats and is_float(numbers.dtype))):
                for number in np.unique(np.abs(numbers.astype(np.float64)))[::-1][:_TRIED].tolist():
                    if math.isfinite(number):
                        yield from dict.fromkeys((math.floor(number), math.ceil(number)))
        elif producer is not None and producer.domain == "" and producer.op_type in _KEEP_NUMBERS:
            waiting += producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
        elif producer is not None and producer.domain == "" and producer.op_type == "Where":
            waiting += producer.inputs[1:]


def _constants(nodes: Sequence[ir.Node]) -> _Constants:
    """The small constants that ``nodes`` take, or compute from such."""
    found: _Constants = {}
    for node in nodes:
        for value in node.inputs:
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
            if value is not None and tensor is not None and tensor.size <= _MOST_NUMBERS and _is_number(tensor.dtype):
                found[value] = np.asarray(tensor.numpy())
        compute = _ARITHMETIC.get(node.op_type) if node.domain == "" else None
        inputs = [found[value] for value in node.inputs if value is not None and value in found]
        if compute is not None and len(inputs) == len(node.inputs) > 0:
            try:
                with np.errstate(all="ignore"):
                    result = np.asarray(compute(*inputs))
            except ValueError:  # shapes that do not go together
                continue
            if result.size <= _MOST_NUMBERS:
                found[node.outputs[0]] = result
    return found


def _is_number(dtype: ir.DataType) -> bool:
    return dtype.bitwidth >= 8 and (dtype.is_integer() or dtype.is_floating_point())


def _positions(nodes: Sequence[ir.Node], constants: _Constants) -> set[ir.Value]:
    """The values that are made of lengths and positions, with constants, and of no input's numbers."""
    found: set[ir.Value] = set()
    for node in nodes:
        inputs = [value for value in node.inputs if value is not None]
        branches = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        if (node.domain == "" and node.op_type in _MAKE_POSITIONS) or (
            not branches
            and any(value in found for value in inputs)
            and all(value in found or _is_constant(value, constants) for value in inputs)
        ):
            found.update(node.outputs)
    return found


def _is_constant(value: ir.Value, constants: _Constants) -> bool:
    return value in constants or ir.convenience.get_const_tensor(value) is not None
