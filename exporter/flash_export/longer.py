# SPDX-License-Identifier: Apache-2.0
"""Inputs longer than the windows of a model's attentions: on shorter ones any window, or none, is the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

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

    ``names``: each size that one of the choices is longer than, and where it comes from. ``too_large``: those of the
    unfused model that none is longer than, since a tensor would be too large.
    """

    choices: tuple[Sizes, ...]
    names: tuple[str, ...]
    too_large: tuple[str, ...]


def longer_setting(
    model: ir.Model,
    taken: Iterable[Sizes],
    every: Sequence[Mapping[str, tuple[int, int]]],
    own: Collection[int],
    *,
    most: int,
) -> Longer | None:
    """A set of inputs that is longer than all windows that it can be; shorter ones where the model refuses it.

    The fused model may lack a window that the unfused one has, so the numbers that this makes masks by positions with,
    and those behind which its ready-made masks change, count as well. None where the ``taken`` are long enough, or
    where the ranges of the dims end before.

    Args:
        model: the unfused one.
        taken: the sizes of all dynamic dims, of each set of inputs that is tried anyway.
        every: ranges of the dims, of each profile of an engine.
        own: the sizes of the fused model's windows.
        most: elements in one tensor of the unfused model.
    """
    lengths = [name for name, is_batch in dynamic_dims(model).items() if not is_batch]
    reached = _reached(lengths, list(taken), every)
    if reached is None:
        return None
    needed = [(size + 2, f"{size} in the fused model", True) for size in own]
    numbers = numbers_on_positions(model).items()
    # i - j <= 300 hides a key from 302 on, i - j < 300 one before: a table of positions may end between the two.
    needed += [(n + 1, f'{n} at node "{node}"', False) for n, node in numbers]
    needed += [
        (n + 2, "", False) for n, _ in numbers if n > 1
    ]  # no name: where n + 1 is the longest, nothing is hidden
    needed += [(n + 1, f'{n} in table "{table}"', False) for n, table in numbers_in_tables(model).items()]
    extent = Extent(model)
    names: dict[str, None] = {}
    too_large: dict[str, None] = {}
    found: list[Sizes] = []
    for least, name, is_own in sorted((one for one in needed if reached < one[0] <= MAX_DIM), reverse=True):
        possible = [
            choice
            for ranges, length in itertools.product(every, (least + _PAST, least))  # some models end soon after
            for choice in _choices(model, lengths, ranges, length, least)
        ]
        fitting = [choice for choice in possible if extent.largest(choice) <= most]
        for choice in fitting:
            if choice not in found:
                found.append(choice)
        if fitting and name:
            names[name] = None
        elif possible and name and not fitting and not is_own:
            too_large[name] = None
    too_large = {name: None for name in too_large if name not in names}
    return Longer(tuple(found), tuple(names), tuple(too_large)) if found or too_large else None


def _reached(
    lengths: Sequence[str], taken: Sequence[Sizes], every: Sequence[Mapping[str, tuple[int, int]]]
) -> int | None:
    """How long every length that can be longer is in one of the ``taken``; None where none of them can be.

    A window may be on any of them: one that is long enough on the longest may hide nothing on the shortest.
    """
    longest = {name: max((sizes[name] for sizes in taken), default=0) for name in lengths}
    ends = {name: max(ranges.get(name, (0, MAX_DIM))[1] for ranges in every) for name in lengths}
    growing = [name for name in lengths if ends[name] > longest[name]]
    if not growing:
        return None
    return max((min(sizes[name] for name in growing) for sizes in taken), default=0)


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
