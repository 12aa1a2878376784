# SPDX-License-Identifier: Apache-2.0
"""Inputs longer than the windows of a model's attentions: on shorter ones any window, or none, is the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from flash_export.draw import dynamic_dims
from flash_export.extent import Extent
from flash_export.inputs import MAX_DIM
from flash_export.window_numbers import numbers_on_positions
from flash_export.window_tables import numbers_in_tables

_PAST = 10
"""How much longer a set of inputs is than the shortest that its window hides a key of: its last rows have keys on both
sides of the window's end, and a window that is a little larger ends there too."""

Sizes = dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Longer:
    """One more set of inputs: ``choices`` of the dynamic dims, the longest first, of which the first taken counts.

    ``names``: each size that one of the choices is longer than, and where it comes from.
    """

    choices: tuple[Sizes, ...]
    names: tuple[str, ...]


def longer_setting(
    model: ir.Model,
    settings: Sequence[Sequence[Sizes]],
    every: Sequence[Mapping[str, tuple[int, int]]],
    own: Collection[int],
    *,
    most: int,
) -> Longer | None:
    """A set of inputs that is longer than all windows that it can be; shorter ones where the model refuses it.

    The fused model may lack a window that the unfused one has, so the numbers that this makes masks by positions with,
    and those behind which its ready-made masks change, count as well. None where the ``settings`` are long enough,
    where the ranges of the dims end before, or where a tensor of the unfused model would be too large.

    Args:
        model: the unfused one.
        settings: those that are tried anyway.
        every: ranges of the dims, of each profile of an engine.
        own: the sizes of the fused model's windows.
        most: elements in one tensor of the unfused model.
    """
    lengths = [name for name, is_batch in dynamic_dims(model).items() if not is_batch]
    if not lengths:
        return None
    reached = max(choices[0][name] for choices in settings for name in lengths)
    needed = [(size + 2, f"{size} in the fused model") for size in own]
    # i - j < 300 hides a key from 301 on, i - j <= 300 one later.
    needed += [(n + 1, f'{n} at node "{node}"') for n, node in numbers_on_positions(model).items()]
    needed += [(n + 1, f'{n} in table "{table}"') for n, table in numbers_in_tables(model).items()]
    needed = sorted((one for one in needed if reached < one[0] <= MAX_DIM), reverse=True)
    if not needed:
        return None
    extent, found, names = Extent(model), [], []
    for least, name in needed:
        fitting = [
            choice
            for ranges, length in itertools.product(every, (least + _PAST, least))  # some models end soon after
            for choice in _choices(model, lengths, ranges, length, least)
            if extent.largest(choice) <= most
        ]
        found += [choice for choice in fitting if choice not in found]
        names += [name] if fitting else []
    return Longer(tuple(found), tuple(names)) if found else None


def _choices(
    model: ir.Model, lengths: Sequence[str], ranges: Mapping[str, tuple[int, int]], length: int, least: int
) -> Iterator[Sizes]:
    """The smallest batch with every length ``length``: all of them different, then alike; none below ``least``."""
    rows = {name: ranges.get(name, (1, 1))[0] or 1 for name, is_batch in dynamic_dims(model).items() if is_batch}
    for step in (2, 0) if len(lengths) > 1 else (0,):
        sizes = {}
        for i, name in enumerate(lengths):
            low, high = ranges.get(name, (0, MAX_DIM))
            sizes[name] = max(low, min(length + step * i, high))
        if max(sizes.values()) >= least:
            yield rows | sizes
