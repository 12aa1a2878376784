# SPDX-License-Identifier: Apache-2.0
"""Layout operators move axes; what they do is followed exactly or not at all."""

from __future__ import annotations

import onnx_ir as ir
from exporter.graphs import model

from flash_export.dims import Dim
from flash_export.layout import Atom, follow, fresh_axes, leaves, regroup, size_of, unify
from flash_export.shapes import Shapes

B, S = Dim.named("B"), Dim.named("S")


def empty_shapes() -> Shapes:
    return Shapes(ir.from_proto(model("y = Relu (x)\n", inputs="float[B] x", outputs="float[B] y")).graph)


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


def test_a_tile_is_followed_where_it_repeats_axes_of_length_one_alone() -> None:
    """As PyTorch's legacy exporter writes ``repeat_interleave``, and as no group of heads can be: ``repeat``."""
    proto = model(
        "u = Unsqueeze (x, ax2)\n groups = Tile (u, once)\n whole = Tile (x, twice)\n",
        inputs="float[B, 4, S, 8] x",
        outputs="float[B, 4, 2, S, 8] groups, float[B, 8, S, 8] whole",
        constants="int64[1] ax2 = {2}, int64[5] once = {1, 1, 2, 1, 1}, int64[4] twice = {1, 2, 1, 1}",
    )
    graph = ir.from_proto(proto).graph
    shapes = Shapes(graph)
    groups, whole = (follow(value, shapes, scalar=None) for value in graph.outputs)
    assert groups is not None
    assert whole is not None
    assert [[str(size_of(a)) for a in axes] for axes in (groups.axes[0], groups.last)] == [
        ["B", "4", "S", "8"],
        ["B", "4", "2", "S", "8"],
    ]
    assert [str(a.size) for a in groups.expanded] == ["2"]
    assert whole.nodes == []
