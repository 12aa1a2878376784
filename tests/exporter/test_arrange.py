# SPDX-License-Identifier: Apache-2.0
"""Arranging gives the layout asked for, with NumPy as the judge, or declines."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flash_export.arrange import Move, arrange
from flash_export.dims import Dim
from flash_export.layout import Atom, Axes

B, S = Dim.named("B"), Dim.named("S")


def moved(array: np.ndarray, moves: list[Move]) -> np.ndarray:
    """NumPy's reading of the moves, independent of the code that made them."""
    for move in moves:
        if move.op == "Transpose":
            array = array.transpose(move.numbers)
        elif move.op == "Squeeze":
            array = array.squeeze(move.numbers)
        elif move.op == "Unsqueeze":
            array = np.expand_dims(array, move.numbers)
        else:
            array = array.reshape([array.shape[i] if n == 0 else n for i, n in enumerate(move.numbers)])
    return array


FORMS: dict[str, str] = {
    "layout 0": "b,s,hd",
    "layout 1": "b,h,s,d",
    "heads last": "b,s,h,d",
    "sequence first": "s,b,hd",
    "transposed key": "b,h,d,s",
    "with a one": "b,1,s,hd",
}


@pytest.mark.parametrize(("have", "want"), list(itertools.product(FORMS, ("layout 0", "layout 1"))))
def test_arranging_gives_the_layout_asked_for(have: str, want: str) -> None:
    sizes = {"b": 3, "s": 5, "h": 4, "d": 7}
    atoms = {n: Atom(Dim.of(size)) for n, size in sizes.items()}

    def axes(form: str) -> Axes:
        return [[] if part == "1" else [atoms[n] for n in part] for part in FORMS[form].split(",")]

    moves = arrange(axes(have), axes(want))
    assert moves is not None
    canonical = np.arange(3 * 5 * 4 * 7).reshape(3, 5, 4, 7)  # b s h d

    def array(form: str) -> np.ndarray:
        parts = FORMS[form].split(",")
        order = [n for part in parts if part != "1" for n in part]
        shape = [int(np.prod([sizes[n] for n in part])) if part != "1" else 1 for part in parts]
        return canonical.transpose(["bshd".index(n) for n in order]).reshape(shape)

    np.testing.assert_array_equal(moved(array(have), moves), array(want))


def test_arranging_that_needs_two_lengths_of_run_time_is_declined() -> None:
    b, s, h, d = Atom(B), Atom(S), Atom(Dim.of(4)), Atom(Dim.of(7))
    assert arrange([[b, s], [h, d]], [[b], [h], [s], [d]]) is None


@pytest.mark.parametrize("form", ["bh,s,d", "bh,1,s", "s,bh,d"])
def test_a_batch_of_run_time_is_told_from_its_heads_while_later_lengths_are_copied(form: str) -> None:
    sizes = {"b": 3, "s": 5, "h": 4, "d": 7}
    atoms = {"b": Atom(B), "s": Atom(S), "h": Atom(Dim.of(4)), "d": Atom(Dim.named("D"))}
    axes: Axes = [[] if part == "1" else [atoms[n] for n in part] for part in form.split(",")]
    wanted: Axes = [[atoms["b"]], [atoms["h"]], [atoms["s"]], [atoms["d"]] if "d" in form else []]
    moves = arrange(axes, wanted)
    assert moves is not None
    shape = [int(np.prod([sizes[n] for n in part])) if part != "1" else 1 for part in form.split(",")]
    array = np.arange(np.prod(shape)).reshape(shape)
    split = array.reshape(*[sizes[n] for part in form.split(",") for n in part if n != "1"])
    letters = [n for part in form.split(",") for n in part if n != "1"]
    right = split.transpose([letters.index(n) for n in "bhsd" if n in letters])
    np.testing.assert_array_equal(moved(array, moves), right if "d" in form else right[..., None])
