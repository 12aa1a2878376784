# SPDX-License-Identifier: Apache-2.0
"""Layout operators move axes; what they do is followed exactly or not at all."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import pytest
from exporter.graphs import model

from flash_export.layout import Atom, Axes, Move, arrange, follow, fresh_axes, leaves, regroup, size_of, unify
from flash_export.shapes import Dim, Shapes

B, S = Dim.named("B"), Dim.named("S")


def empty_shapes() -> Shapes:
    return Shapes(ir.from_proto(model("y = Relu (x)\n", inputs="float[B] x", outputs="float[B] y")).graph)


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


def test_regrouping_splits_only_exact_factors() -> None:
    axes = fresh_axes((B, S, Dim.of(28)))
    split = regroup(axes, (B, S, Dim.of(4), Dim.of(7)))
    assert split is not None
    assert leaves(axes[2]) == [*leaves(split[2]), *leaves(split[3])]
    assert regroup(fresh_axes((B, S)), (S, B)) is None
    assert regroup(fresh_axes((Dim.of(6), Dim.of(4))), (Dim.of(4), Dim.of(6))) is None
    assert regroup(fresh_axes((Dim.of(12),)), (Dim.of(5), Dim.of(3))) is None


def test_unifying_splits_query_heads_into_groups_of_key_heads() -> None:
    query, groups = [Atom(Dim.of(12))], [Atom(Dim.of(3)), Atom(Dim.of(4))]
    assert unify(query, groups, empty_shapes())
    assert [a.size.static for a in leaves(query)] == [3, 4]
    assert leaves(query) == leaves(groups)
    assert not unify([Atom(Dim.of(12))], [Atom(Dim.of(5))], empty_shapes())


def test_a_chain_stops_at_a_reshape_that_is_not_understood() -> None:
    proto = model(
        "t = Transpose <perm = [1, 0]> (x)\n r = Reshape (t, mixed)\n y = Transpose <perm = [1, 0]> (r)\n",
        inputs="float[6, 4] x",
        outputs="float[3, 8] y",
        constants="int64[2] mixed = {8, 3}",
    )
    converted = ir.from_proto(proto)
    chain = follow(converted.graph.outputs[0], Shapes(converted.graph), scalar=None)
    assert chain is not None
    assert [v.name for v in chain.values] == ["x", "t", "r", "y"]  # 4*6 splits as 4, 2, 3: [4, 2], [3]
    assert [size_of(a).static for a in chain.last] == [3, 8]
    other = model(
        "t = Transpose <perm = [1, 0]> (x)\n r = Reshape (t, mixed)\n y = Transpose <perm = [1, 0]> (r)\n",
        inputs="float[6, 4] x",
        outputs="float[8, 3] y",
        constants="int64[2] mixed = {3, 8}",
    )
    converted = ir.from_proto(other)
    chain = follow(converted.graph.outputs[0], Shapes(converted.graph), scalar=None)
    assert chain is not None
    assert [v.name for v in chain.values] == ["r", "y"]
