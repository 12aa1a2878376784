# SPDX-License-Identifier: Apache-2.0
"""Two dimensions that the model needs equal, and that the user gave as two: found by the sizes in an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from flash_export.load import Argument
from flash_export.options import Dim

_Axis = tuple[str, int, int, Dim | None]
"""Of an input: its name, the axis, the size in the example, the dimension where it is dynamic."""


_UNEQUAL = re.compile(
    r"\((\d+)\) must match the (?:size of tensor b|existing size) \((\d+)\)|xpected size (\d+) but got size (\d+)"
)
"""How PyTorch says of an element-wise operator, expand and cat that two sizes differ."""


def advice(message: str, arguments: Sequence[Argument]) -> str:
    """What to do where forward's error names the sizes of two axes, of which at least one is dynamic; else empty.

    Examples have a size of its own for each dimension, so that an error about two sizes is about two dimensions.
    """
    found = _UNEQUAL.search(message)
    if found is None:
        return ""
    sizes = {int(number) for number in found.groups() if number}
    for first in _axes(arguments):
        for second in _axes(arguments):
            if first[0] == second[0] or first[3] is None or first[3] == second[3] or first[2] == second[2]:
                continue
            if {first[2], second[2]} == sizes:
                return _one_name(first, second)
    return ""


def with_fixed(name: str, value: str, arguments: Sequence[Argument]) -> str:
    """What to do where PyTorch finds that dimension ``name`` is ``value``, as another input's axis is; else empty.

    Args:
        name: a dynamic dimension.
        value: a number, or another dimension's name.
    """
    own = next((axis for axis in _axes(arguments) if axis[3] is not None and axis[3].name == name), None)
    for other in _axes(arguments):
        known = str(other[2]) if other[3] is None else other[3].name
        if own is not None and other[0] != own[0] and known == value:
            return _one_name(own, other)
    return ""


def _one_name(named: _Axis, other: _Axis) -> str:
    assert named[3] is not None
    spelled = f"the number {other[2]}" if other[3] is None else other[3].name
    return (
        f"where axis {named[1]} of {named[0]} ({named[3].name}) and axis {other[1]} of {other[0]} ({spelled}) are one "
        f"size, give both the name {named[3].name}; else make forward work for sizes that differ"
    )


def _axes(arguments: Sequence[Argument]) -> Iterator[_Axis]:
    for argument in arguments:
        for axis, size in enumerate(argument.tensor.shape):
            yield argument.name, axis, int(size), argument.dims.get(axis)
