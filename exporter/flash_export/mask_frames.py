# SPDX-License-Identifier: Apache-2.0
"""From where a mask counts its queries: a band is proven only of a mask that counts them all from one place.

Query ``i`` and key ``j`` are counted from the first ones, or the query from the last ones (``i + T - S``). A mask of
``(i, j)`` alone, or of ``j - (i + T - S)`` alone, shows all of its form where rows and keys are both many. One that
counts in both ways, or that asks for a length beside a position (``i == S - 1``), may change at lengths that nobody
tries, and stays a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from flash_export.dims import Dim


class MixedFrames(Exception):
    """A mask counts its queries from more than one place."""


@dataclasses.dataclass(slots=True)
class Frames:
    """The places from which the comparisons of one mask count.

    Args:
        rows: the number of queries.
        columns: the number of keys.
        base: the sizes at which comparisons are looked at.
        shifts: for each direction in which sizes change, by how much ``columns - rows`` does.
    """

    rows: Dim
    columns: Dim
    base: dict[str, int]
    shifts: list[int]
    _kinds: set[str] = dataclasses.field(default_factory=set)
    _alone: bool = False  # whether something asks for a query or for a key alone

    def add_comparison(self, difference: np.ndarray, slopes: Sequence[float]) -> None:
        """Notes from where ``difference``, of two sides at the base sizes, counts.

        Args:
            difference: it varies with positions.
            slopes: what each element gains by one step in each direction.

        Raises:
            MixedFrames: it asks for a length beside a position.
        """
        known, by_row, by_key = self._steps(difference)
        self._alone |= not (by_row.any() and by_key.any())
        if any(slopes):
            steps = np.unique(by_row)
            moved = [steps[0] * shift for shift in self.shifts] if known and len(steps) == 1 else None
            if moved != list(slopes):
                raise MixedFrames
            self._kinds.add("last")
        elif not known and self._is_moved:
            self._kinds.add("elsewhere")
        elif by_row.any():
            self._kinds.add("first")

    def add_triangle(self, shape: tuple[int, ...], slopes: Sequence[float]) -> None:
        """Notes a Trilu of a tensor of this shape at the base sizes, whose diagonal gains ``slopes``.

        Raises:
            MixedFrames: its diagonal is none of the two of an attention.
        """
        if any(slopes):
            if not np.array_equal(slopes, self.shifts):
                raise MixedFrames
            self._kinds.add("last")
        else:
            self._kinds.add("first" if shape[-2:] == self._sides or not self._is_moved else "elsewhere")

    def add_moving_table(self) -> None:
        """Notes rows of a table that begin later the more keys there are."""
        self._kinds.add("last")

    def refuse_mixed(self) -> None:
        """Refuses what does not count from one place.

        Raises:
            MixedFrames: it does not.
        """
        if len(self._kinds) > 1 or (self._kinds and "first" not in self._kinds and self._alone):
            raise MixedFrames

    @property
    def _is_moved(self) -> bool:
        """Whether counting from the last ones is another thing than counting from the first."""
        return any(self.shifts)

    @property
    def _sides(self) -> tuple[int, int]:
        return self.rows.evaluate(self.base), self.columns.evaluate(self.base)

    def _steps(self, difference: np.ndarray) -> tuple[bool, np.ndarray, np.ndarray]:
        """Whether the axes are known to be queries and keys, and the steps from one query and one key to the next."""
        rows, columns = self._sides
        shape = (1, *difference.shape) if difference.ndim == 1 else difference.shape
        if difference.ndim == 1 and shape[-1] == rows != columns:
            shape = (rows, 1)
        full = difference.reshape(shape)
        return shape[-2] in (1, rows) and shape[-1] in (1, columns), np.diff(full, axis=-2), np.diff(full, axis=-1)
