# SPDX-License-Identifier: Apache-2.0
"""Which of an engine's profiles runs: the first that holds the shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flash_trt.shapes import Profile


def never_run(profiles: Sequence[Profile]) -> Iterator[tuple[int, int]]:
    """The number of each profile whose shapes an earlier one holds, and that one's: the first that holds them runs."""
    for number, profile in enumerate(profiles):
        holding = (i for i, earlier in enumerate(profiles[:number]) if _holds(earlier, profile))
        yield from ((number, earlier) for earlier in list(holding)[:1])


def _holds(outer: Profile, inner: Profile) -> bool:
    ranges = {range_.name: range_ for range_ in outer.ranges}
    return all(
        low <= inner_low and inner_high <= high
        for range_ in inner.ranges
        for low, inner_low, inner_high, high in zip(
            ranges[range_.name].smallest, range_.smallest, range_.largest, ranges[range_.name].largest, strict=True
        )
    )
