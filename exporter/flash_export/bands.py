# SPDX-License-Identifier: Apache-2.0
"""Proves that a mask is causal or a window: evaluated at many lengths, it must be the same band at every one.

The lengths are unequal, equal, 0, 1, more than a tile, just at and past every constant that the mask is computed from,
and beyond the last length at which it can change (``reach``), so that a sliding window of 4,096 is not taken for
causal. Where a constant ends, as a buffer of 1,024 positions does, the largest lengths that it allows are searched for
and tried. A mask for which that length is unknown or too large to try stays a tensor.
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
from flash_export.reach import SMALL, landmarks
from flash_export.switches import Switches, switches_of

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
        has_table = any(a.size > SMALL and (a != a.flat[0]).any() for a in evaluator.constants(value))
    except NotEvaluable:
        return None
    found = landmarks(value, evaluator) if needed else ([], 1)
    switches = switches_of(value, needed, seqlen_q, seqlen_kv, evaluator) if needed and found else Switches([])
    if found is None or switches is None or max([found[1], *switches.points]) > FAR:
        return None
    names = sorted(needed)
    # A length that is in both makes rows and keys many by itself.
    apart = seqlen_q.symbols and seqlen_kv.symbols and not seqlen_q.symbols & seqlen_kv.symbols
    together = sorted(seqlen_q.symbols | seqlen_kv.symbols) if apart else []
    trials = _Trials(value, seqlen_q, seqlen_kv, evaluator)
    results: list[Seen] = []
    try:
        for sizes, must_fit in _settings(names, together, *found, switches, largest=FAR if has_table else NEAR):
            results.extend(look(full) for full in trials.at(sizes, must_fit=must_fit))
        for sizes in trials.edges(names, largest=max(NEAR, found[1]) + 3):
            results.extend(look(full) for full in trials.at(sizes))
    except _Unproven:
        return None
    return results if len(results) >= (3 if needed else 1) else None


class _Unproven(Exception):
    """A length without which nothing is proven cannot be tried."""


class _Trials:
    """One mask at many sizes, and at which of them it fits the scores."""

    def __init__(self, value: ir.Value, seqlen_q: Dim, seqlen_kv: Dim, evaluator: Evaluator) -> None:
        self._value, self._rows, self._columns, self._evaluator = value, seqlen_q, seqlen_kv, evaluator
        self._fits: dict[tuple[tuple[str, int], ...], bool] = {}
        self._sides: set[tuple[bool, bool]] = set()  # whether rows and columns were there, and not one for all

    def at(self, sizes: Mapping[str, int], *, must_fit: bool = True) -> list[np.ndarray]:
        """The mask as ``[Sq, Skv]``; empty where it does not fit, or takes too much memory and need not be tried.

        Raises:
            _Unproven: it takes too much memory, and ``must_fit``; or it varies by batch or head.
        """
        rows, columns = self._rows.evaluate(sizes), self._columns.evaluate(sizes)
        if rows < 0 or columns < 1:
            return []
        try:
            if rows * columns > MAX_ELEMENTS:
                raise TooLarge(f"{rows} x {columns}")
            array = self._evaluator.evaluate(self._value, sizes)
        except TooLarge as error:
            if must_fit:
                raise _Unproven from error
            return []
        except NotEvaluable:
            array = None
        full = None if array is None else _as_matrix(array, rows, columns)
        if array is not None and full is not None and min(rows, columns) > 1:
            # A cut that ends with a single row is that row for every query, and no longer this mask.
            sides = (array.ndim > 1 and array.shape[-2] == rows, array.ndim > 0 and array.shape[-1] == columns)
            self._sides = self._sides or {sides}
            full = full if sides in self._sides else None
        self._fits[_key(sizes)] = full is not None
        return [] if full is None else [full]

    def edges(self, names: list[str], *, largest: int) -> Iterator[Mapping[str, int]]:
        """The largest sizes that fit, where a constant in the graph ends before ``largest``: there all of it is seen.

        Each dim grows alone, and all together.

        Raises:
            _Unproven: sizes beyond such an end fit again, so that it is none.
        """
        ways = [(one,) for one in names] + ([tuple(names)] if len(names) > 1 else [])
        for way in ways:
            fits, too_large = self._known(names, way)
            if not fits or not (beyond := [n for n in too_large if n > max(fits)]):
                continue
            low, high = max(fits), min(beyond)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.at(_sizes(names, way, middle)) else (low, middle)
            steps = {high + 1, 2 * high, *(high + step - high % step for step in _ALIGNED)}
            if any(n <= largest and self.at(_sizes(names, way, n), must_fit=False) for n in steps):
                raise _Unproven
            yield _sizes(names, way, low)

    def _known(self, names: list[str], way: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """The sizes in one direction that were found to fit, and those that were not."""
        fits: list[int] = []
        others: list[int] = []
        for key, fit in self._fits.items():
            size = dict(key)[way[0]]
            if key == _key(_sizes(names, way, size)):
                (fits if fit else others).append(size)
        return fits, others


_ALIGNED = (2, 3, 4, 8, 16, 32, 64, 128, 256)
"""A length may have to be a multiple of one of these."""


def _key(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes.items()))


def _sizes(names: list[str], way: tuple[str, ...], size: int) -> dict[str, int]:
    return dict.fromkeys(names, 5) | dict.fromkeys(way, size)


def _as_matrix(array: np.ndarray, rows: int, columns: int) -> np.ndarray | None:
    """The array broadcast to ``[Sq, Skv]``; None when it does not fit.

    Raises:
        _Unproven: it fits, and varies by batch or head. Lengths at which all heads are alike prove nothing then.
    """
    if 0 in array.shape[:-2]:
        return None
    flat = array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])  # -1 would be undefined for no keys
    try:
        full = np.broadcast_to(flat[0], (rows, columns))
    except ValueError:
        return None
    if not (flat == flat[:1]).all():
        raise _Unproven
    return full


def _settings(
    names: list[str], together: list[str], marks: list[int], reach: int, switches: Switches, *, largest: int
) -> Iterator[tuple[Mapping[str, int], bool]]:
    """Sizes of the dynamic dims to try, and whether nothing is proven without them.

    They are distinct, equal, 1, beyond a tile, just at and past every landmark, beyond all of them, and far; and each
    length around which the form may switch, beside others that are shorter, alike, longer and beyond all landmarks.
    ``together``: dims that are beyond all landmarks at once too, since a mask may differ where rows and keys both are.
    """
    count = range(len(names))
    yield dict(zip(names, (5 + 2 * i for i in count), strict=True)), True
    if not names:
        return
    yield dict(zip(names, (5 + 2 * (len(names) - i) for i in count), strict=True)), True
    yield dict.fromkeys(names, 6), True
    for one in names:
        yield dict.fromkeys(names, 5) | {one: 0}, True
        yield dict.fromkeys(names, 9) | {one: 1}, True
        yield dict.fromkeys(names, 3) | {one: 67}, True
        yield dict.fromkeys(names, 5) | {one: max(NEAR, reach) + 3}, True
        if len(names) > 1:
            yield dict.fromkeys(names, 5) | {one: FAR + 3}, False
    if together:
        long = max(NEAR, reach) + 3
        yield dict.fromkeys(names, 2) | dict.fromkeys(together, long), True
        for one in together if switches.compares else []:
            yield dict.fromkeys(names, 2) | dict.fromkeys(together, long) | {one: long + 1}, True
    for size, one in itertools.product(switches.points, names):
        yield dict.fromkeys(names, size), size <= largest
        yield dict.fromkeys(names, 5) | {one: size}, True
        for other in names:
            if other != one:
                yield dict.fromkeys(names, 5) | {other: size + 7, one: size}, True
                yield dict.fromkeys(names, 5) | {other: max(NEAR, reach) + 3, one: size}, True
    for mark in marks:
        for size in (mark, mark + 3):
            for one in names:
                yield dict.fromkeys(names, 5) | {one: size}, True
            yield dict.fromkeys(names, size), size <= largest


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
