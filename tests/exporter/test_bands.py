# SPDX-License-Identifier: Apache-2.0
"""A mask is told by the first, the last and the number of visible keys of each row: no other mask passes for a band."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from exporter import graphs
from exporter.test_evaluate import evaluator_of

from flash_export.bands import Band, Visible, match, trials_of
from flash_export.dims import Dim

SIZES = [(5, 7), (7, 5), (1, 9), (9, 1), (6, 6), (67, 3), (3, 67)]


def dense(rows: int, columns: int, left: int | None, right: int | None, *, bottom_right: bool) -> np.ndarray:
    """The definition, key by key."""
    offset = columns - rows if bottom_right else 0
    seen = np.zeros((rows, columns), bool)
    for i in range(rows):
        for j in range(columns):
            distance = j - i - offset
            seen[i, j] = (left is None or distance >= -left) and (right is None or distance <= right)
    return seen


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (2, 0), (0, 0), (3, None), (2, 1), (None, 3)])
def test_a_band_is_read_from_its_rows_alone(left: int | None, right: int | None, bottom_right: bool) -> None:
    masks = [dense(*size, left, right, bottom_right=bottom_right) for size in SIZES]
    full = all(bool(m.any(-1).all()) for m in masks)
    assert match([Visible.of(m) for m in masks]) == Band(left, right, bottom_right, full)


@pytest.mark.parametrize("seed", range(40))
def test_a_band_with_one_key_turned_over_is_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = [None, 0, 2][seed % 3], [0, 1][seed % 2]
    masks = [dense(*size, left, right, bottom_right=bool(seed & 4)) for size in SIZES]
    mask = masks[rng.integers(len(masks))]
    at = tuple(rng.integers(mask.shape))
    mask[at] = not mask[at]
    assert match([Visible.of(m) for m in masks]) is None


def test_masks_that_hide_nothing_and_rows_without_a_key() -> None:
    assert match([Visible.of(np.ones(size, bool)) for size in SIZES]) == Band(None, None, False, True)
    assert match([Visible.of(np.zeros((0, 4), bool))]) == Band(None, None, False, True)
    keyless = match([Visible.of(dense(*size, None, 0, bottom_right=True)) for size in SIZES])
    assert keyless is not None
    assert not keyless.full_rows


def test_a_proof_holds_one_array_at_a_time() -> None:
    """A mask that changes at 700, 900 and 1,100 is tried around each; 30 operators lie on the way to it."""
    chain = "\n".join(f" s{n + 1} = And (s{n}, keep)" for n in range(30))
    marks = " ".join(f"far{n} = Less (d, m{n})\n keep{n} = Or (far{n}, keep)\n" for n in (700, 900, 1100))
    joined = "k1 = And (keep700, keep900)\n s0 = And (k1, keep1100)\n"
    body = (
        graphs.LENGTHS
        + f"keep = LessOrEqual (j, i)\n d = Sub (i, j)\n {marks} {joined}{chain}\n b = Cast <to = 7> (s30)\n"
    )
    constants = graphs.CONSTANTS + "".join(f", int64 m{n} = {{{n}}}" for n in (700, 900, 1100))
    evaluator, values = evaluator_of(body, "int64[S, T] b", constants=constants)
    tracemalloc.start()
    tried = trials_of(values["b"], Dim.named("S"), Dim.named("T"), evaluator, lambda a: a.shape)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tried is not None
    largest = max(rows * columns for rows, columns in tried)
    assert largest > 1100**2
    assert peak < 3 * 8 * largest, f"{peak / largest:.0f} bytes an element: more than three arrays of int64"
