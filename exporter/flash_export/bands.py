# SPDX-License-Identifier: Apache-2.0
"""Proves that a mask is causal or a window: evaluated at many lengths, it must be the same band at every one.

The lengths are unequal, equal, 1, more than a tile, just at and past every constant that the mask is computed from,
and beyond the last length at which it can change (``reach``), so that a sliding window of 4,096 is not taken for
causal. A mask for which that length is unknown or too large to try stays a tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from flash_export.dims import Dim
from flash_export.evaluate import MAX_ELEMENTS, Evaluator, NotEvaluable, TooLarge
from flash_export.reach import landmarks
from flash_export.switches import switching_points

FAR = 1 << 17
"""Every mask is also tried at this length where that takes little memory: longer than a model's longest input."""

NEAR = 2048
"""Every mask is tried at this length; where a tensor on the way is too large for ``evaluate``, it stays a tensor."""

Seen = TypeVar("Seen")


@dataclasses.dataclass(frozen=True, slots=True)
class Visible:
    """The visible keys of one trial by its rows: the first, the last and how many. None of a row: the count is 0.

    That tells a band from anything else, and is far smaller than the mask.
    """

    columns: int
    first: np.ndarray
    last: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, visible: np.ndarray) -> Visible:
        """Of a boolean ``[Sq, Skv]`` with at least one column."""
        columns = visible.shape[1]
        last = columns - 1 - visible[:, ::-1].argmax(-1)
        return cls(columns, visible.argmax(-1), last, np.count_nonzero(visible, axis=-1))

    def diagonal(self, bottom_right: bool) -> np.ndarray:
        """The key on the diagonal of each row."""
        return np.arange(len(self.count)) + (self.columns - len(self.count) if bottom_right else 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """Visible keys of query i: ``i + offset - left`` to ``i + offset + right``; None: no bound on that side.

    ``offset`` is 0 for the top-left diagonal and Skv - Sq for ``bottom_right``. ``full_rows``: at every length tried
    each row has a visible key.
    """

    left: int | None
    right: int | None
    bottom_right: bool
    full_rows: bool

    @property
    def hides_nothing(self) -> bool:
        """True when every key is visible."""
        return self.left is None and self.right is None


TOP_LEFT = Band(None, 0, False, True)
"""Causal as PyTorch's ``is_causal`` and ONNX's ``Attention`` mean it: query i sees keys 0 to i."""
BOTTOM_RIGHT = Band(None, 0, True, False)
"""Causal as a query means it that continues a cache: the last query sees every key."""


def trials_of(
    value: ir.Value, seqlen_q: Dim, seqlen_kv: Dim, evaluator: Evaluator, look: Callable[[np.ndarray], Seen]
) -> list[Seen] | None:
    """What ``look`` says of ``value`` as ``[Sq, Skv]`` at many lengths; None when too few lengths fit.

    One array is in memory at a time, so ``look`` should keep no view of it.
    """
    try:
        needed = evaluator.symbols(value) | seqlen_q.symbols | seqlen_kv.symbols
    except NotEvaluable:
        return None
    found = landmarks(value, evaluator) if needed else ([], 1)
    switches = switching_points(value, needed, evaluator) if needed and found else []
    if found is None or switches is None or max([found[1], *switches]) > FAR:
        return None
    results = []
    for sizes, must_fit in _settings(sorted(needed), *found, switches):
        rows, columns = seqlen_q.evaluate(sizes), seqlen_kv.evaluate(sizes)
        if rows < 0 or columns < 1:
            continue
        try:
            if rows * columns > MAX_ELEMENTS:
                raise TooLarge(f"{rows} x {columns}")
            full = _as_matrix(evaluator.evaluate(value, sizes), rows, columns)
        except TooLarge:
            if must_fit:
                return None
            continue
        except NotEvaluable:
            continue
        if full is not None:
            results.append(look(full))
    return results if len(results) >= (3 if needed else 1) else None


def _as_matrix(array: np.ndarray, rows: int, columns: int) -> np.ndarray | None:
    """The array broadcast to ``[Sq, Skv]``; None when it also varies by batch or head, or does not fit."""
    if array.ndim > 2:
        flat = array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])  # -1 would be undefined for no keys
        if flat.shape[0] == 0 or not (flat == flat[:1]).all():
            return None
        array = flat[0]
    try:
        return np.broadcast_to(array, (rows, columns))
    except ValueError:
        return None


def _settings(
    names: list[str], marks: list[int], reach: int, switches: list[int]
) -> Iterator[tuple[Mapping[str, int], bool]]:
    """Sizes of the dynamic dims to try, and whether nothing is proven without them.

    They are distinct, equal, 1, beyond a tile, just at and past every landmark, beyond all of them, and far; and each
    length around which the form may switch, beside others that are shorter, alike, longer and beyond all landmarks.
    """
    count = range(len(names))
    yield dict(zip(names, (5 + 2 * i for i in count), strict=True)), True
    if not names:
        return
    yield dict(zip(names, (5 + 2 * (len(names) - i) for i in count), strict=True)), True
    yield dict.fromkeys(names, 6), True
    for one in names:
        yield dict.fromkeys(names, 9) | {one: 1}, True
        yield dict.fromkeys(names, 3) | {one: 67}, True
        yield dict.fromkeys(names, 5) | {one: max(NEAR, reach) + 3}, True
        if len(names) > 1:
            yield dict.fromkeys(names, 5) | {one: FAR + 3}, False
    for size, one in itertools.product(switches, names):
        yield dict.fromkeys(names, size), size <= NEAR
        yield dict.fromkeys(names, 5) | {one: size}, True
        for other in names:
            if other != one:
                yield dict.fromkeys(names, 5) | {other: size + 7, one: size}, True
                yield dict.fromkeys(names, 5) | {other: max(NEAR, reach) + 3, one: size}, True
    for mark in marks:
        for size in (mark, mark + 3):
            for one in names:
                yield dict.fromkeys(names, 5) | {one: size}, True
            yield dict.fromkeys(names, size), size <= NEAR


def match(trials: list[Visible]) -> Band | None:
    """The band that the visible keys of every trial make; None when there is none."""
    full_rows = all(bool(seen.count.all()) for seen in trials)
    if all(bool((seen.count == seen.columns).all()) for seen in trials):
        return Band(None, None, False, True)
    bounds = [_bounds(trials, bottom_right) for bottom_right in (False, True)]
    # Causal first, so that a fixed bottom-right mask is not read as a top-left window.
    for causal in (True, False):
        for bottom_right, (left, right) in zip((False, True), bounds, strict=True):
            options = [(None, 0), (left, 0)] if causal else [(None, right), (left, None), (left, right)]
            for option in options:
                if _agrees(trials, bottom_right, *option):
                    return Band(option[0], option[1], bottom_right, full_rows)
    return None


def _bounds(trials: list[Visible], bottom_right: bool) -> tuple[int, int]:
    left = right = -1
    for seen in trials:
        rows, diagonal = seen.count > 0, seen.diagonal(bottom_right)
        left = max(left, int((diagonal - seen.first)[rows].max(initial=left)))
        right = max(right, int((seen.last - diagonal)[rows].max(initial=right)))
    return left, right


def _agrees(trials: list[Visible], bottom_right: bool, left: int | None, right: int | None) -> bool:
    if (left is not None and left < 0) or (right is not None and right < 0):
        return False
    for seen in trials:
        diagonal, end = seen.diagonal(bottom_right), seen.columns - 1
        first = np.zeros_like(diagonal) if left is None else np.maximum(diagonal - left, 0)
        last = np.full_like(diagonal, end) if right is None else np.minimum(diagonal + right, end)
        count = np.maximum(last - first + 1, 0)
        rows = count > 0
        same = np.array_equal(count, seen.count) and np.array_equal(first[rows], seen.first[rows])
        if not same or not np.array_equal(last[rows], seen.last[rows]):
            return False
    return True
