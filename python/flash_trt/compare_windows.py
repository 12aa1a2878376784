# SPDX-License-Identifier: Apache-2.0
"""Inputs longer than the windows of a model's attentions: on shorter ones any window, or none, is the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from flash_export.draw import dynamic_dims
from flash_export.extent import Extent
from flash_export.trials import MOST_ELEMENTS
from flash_trt.onnx_file import OnnxFile
from flash_trt.shapes import LARGEST_DIM

_PAST = 12
"""How much longer than its window a set of inputs is: its last rows have keys on both sides of the window's end, and a
window that is a little larger in REFERENCE ends there too."""

_ON_POSITIONS = frozenset(("Add", "Sub", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"))
"""What a mask by positions does with the size of its window."""

Sizes = dict[str, int]


def sizes_of(fused: OnnxFile | None) -> set[int]:
    """The sizes of the windows of FUSED's attentions; none of an engine, whose attributes are not read."""
    values = [node.attributes for node in fused.flash_nodes] if fused else []
    found = {attributes.get(name) for attributes in values for name in ("window_left", "window_right")}
    return {size for size in found if isinstance(size, int) and size >= 0}


def longer_settings(
    model: ir.Model,
    settings: Sequence[Sequence[Sizes]],
    every: Sequence[Mapping[str, tuple[int, int]]],
    own: Collection[int],
) -> list[list[Sizes]]:
    """One setting of the dynamic dims that is longer than all windows that it can be, or none.

    FUSED may lack a window that REFERENCE has, so whole numbers that REFERENCE compares positions with count as well.
    None where the ``settings`` are long enough, where the ranges of the dims end before, or where a tensor of the
    unfused model would be too large.

    Args:
        model: REFERENCE.
        settings: those that are tried anyway.
        every: ranges of the dims, of each profile of an engine.
        own: the sizes of FUSED's windows.
    """
    lengths = [name for name, is_batch in dynamic_dims(model).items() if not is_batch]
    if not lengths:
        return []
    reached = max(choices[0][name] for choices in settings for name in lengths)
    wanted = sorted({size for size in (*own, *_numbers_on_positions(model)) if reached < size + 2 <= LARGEST_DIM})
    if not wanted:
        return []
    extent = Extent(model)
    for size in reversed(wanted):
        for ranges in every:
            choices = [c for c in _choices(model, lengths, ranges, size) if extent.largest(c) <= MOST_ELEMENTS]
            if choices:
                return [choices]
    return []


def may_be_passed(model: ir.Model, ranges: Mapping[str, tuple[int, int]], length: int) -> bool:
    """Whether REFERENCE's dynamic dims, with ``ranges`` where they are known, let an attention be of ``length``."""
    lengths = [name for name, is_batch in dynamic_dims(model).items() if not is_batch]
    return sum(ranges.get(name, (0, LARGEST_DIM))[1] for name in lengths) >= length


def _choices(
    model: ir.Model, lengths: Sequence[str], ranges: Mapping[str, tuple[int, int]], size: int
) -> Iterator[Sizes]:
    """The smallest batch with every length past ``size``: all of them different, then alike; none where none may be."""
    rows = {name: ranges.get(name, (1, 1))[0] or 1 for name, is_batch in dynamic_dims(model).items() if is_batch}
    for step in (2, 0) if len(lengths) > 1 else (0,):
        sizes = {}
        for i, name in enumerate(lengths):
            low, high = ranges.get(name, (0, LARGEST_DIM))
            sizes[name] = max(low, min(size + _PAST + step * i, high))
        if max(sizes.values()) >= size + 2:
            yield rows | sizes


def _numbers_on_positions(model: ir.Model) -> set[int]:
    """Every whole number that is a constant of the main graph and that integers are added to or compared with."""
    found = set()
    for node in model.graph:
        for value in node.inputs if node.op_type in _ON_POSITIONS and node.domain == "" else ():
            constant = ir.convenience.get_const_tensor(value) if value is not None else None
            if constant is not None and constant.size == 1 and constant.dtype in (ir.DataType.INT64, ir.DataType.INT32):
                found.add(abs(int(np.asarray(constant.numpy()).item())))
    return found
