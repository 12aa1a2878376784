# SPDX-License-Identifier: Apache-2.0
"""Proves that a mask is causal or a window: evaluated at many lengths, it must be the same band at every one.

The lengths are unequal, equal, 1, more than a tile, just at and past every constant that the mask is computed from,
and beyond the last length at which it can change (``reach``), so that a sliding window of 4,096 is not taken for
causal. A mask for which that length is unknown or too large to try stays a tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from flash_export.dims import Dim
from flash_export.evaluate import MAX_ELEMENTS, Evaluator, NotEvaluable, TooLarge
from flash_export.reach import landmarks

FAR = 1 << 17
"""Every mask is also tried at this length where that takes little memory: longer than a model's longest input."""

NEAR = 2048
"""Every mask is tried at this length; where a tensor on the way is too large for ``evaluate``, it stays a tensor."""

Trial = tuple[np.ndarray, int, int]
"""A mask broadcast to ``[Sq, Skv]``, Sq and Skv."""


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


def trials_of(value: ir.Value, seqlen_q: Dim, seqlen_kv: Dim, evaluator: Evaluator) -> list[Trial] | None:
    """``value`` at many lengths as ``[..., Sq, Skv]`` with Sq and Skv; None when too few lengths fit."""
    try:
        needed = evaluator.symbols(value) | seqlen_q.symbols | seqlen_kv.symbols
    except NotEvaluable:
        return None
    found = landmarks(value, evaluator) if needed else ([], 1)
    if found is None or found[1] > FAR:
        return None
    results = []
    for sizes, must_fit in _settings(sorted(needed), *found):
        rows, columns = seqlen_q.evaluate(sizes), seqlen_kv.evaluate(sizes)
        if rows < 0 or columns < 1:
            continue
        try:
            if rows * columns > MAX_ELEMENTS:
                raise TooLarge(f"{rows} x {columns}")
            array = evaluator.evaluate(value, sizes)
        except TooLarge:
            if must_fit:
                return None
            continue
        except NotEvaluable:
            continue
        full = _as_matrix(array, rows, columns)
        if full is not None:
            results.append((full, rows, columns))
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


def _settings(names: list[str], marks: list[int], reach: int) -> Iterator[tuple[Mapping[str, int], bool]]:
    """Sizes of the dynamic dims to try, and whether nothing is proven without them.

    They are distinct, equal, 1, beyond a tile, just at and past every landmark, beyond all of them, and far.
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
    for mark in marks:
        for size in (mark, mark + 3):
            for one in names:
                yield dict.fromkeys(names, 5) | {one: size}, True
            yield dict.fromkeys(names, size), size <= NEAR


def match(trials: list[Trial]) -> Band | None:
    """The band that the visible keys of every trial make; None when there is none."""
    full_rows = all(bool(visible.any(-1).all()) for visible, _, _ in trials)
    if all(bool(visible.all()) for visible, _, _ in trials):
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


def _bounds(trials: list[Trial], bottom_right: bool) -> tuple[int, int]:
    left = right = -1
    for visible, rows, columns in trials:
        distance = _distance(rows, columns, bottom_right)[visible]
        if distance.size:
            left, right = max(left, -int(distance.min())), max(right, int(distance.max()))
    return left, right


def _distance(rows: int, columns: int, bottom_right: bool) -> np.ndarray:
    offset = columns - rows if bottom_right else 0
    return np.arange(columns)[None, :] - np.arange(rows)[:, None] - offset


def _agrees(trials: list[Trial], bottom_right: bool, left: int | None, right: int | None) -> bool:
    if (left is not None and left < 0) or (right is not None and right < 0):
        return False
    for visible, rows, columns in trials:
        distance = _distance(rows, columns, bottom_right)
        expected = np.ones_like(visible, dtype=bool)
        if left is not None:
            expected &= distance >= -left
        if right is not None:
            expected &= distance <= right
        if not np.array_equal(expected, visible):
            return False
    return True
