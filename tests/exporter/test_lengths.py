# SPDX-License-Identifier: Apache-2.0
"""A mask that compares positions with a length of each batch entry becomes kv_lengths; nothing else does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exporter.graphs import CONSTANTS, LENGTHS, PRODUCT, QKV, REST, fuse, model, numbers, only
from exporter.torch_exports import run

INPUTS = QKV + ", int64[B] n"
WIDE = "many = Unsqueeze (n, ax1)\n"
TO_SCORES = "wide = Unsqueeze ({}, heads)\n"
HIDE = "masked = Where (wide, hidden, scaled)"
SHOW = "masked = Where (wide, scaled, hidden)"
AXES = CONSTANTS + ", int64[2] heads = {1, 2}, float[1] inf = {-inf}"


def graph(mask: str, *, inputs: str = INPUTS, before: str = WIDE) -> onnx.ModelProto:
    return model(LENGTHS + PRODUCT + before + mask + "\n" + REST, inputs=inputs, constants=AXES)


MASKS = {
    "hidden_from_there": f"m = GreaterOrEqual (column, many)\n {TO_SCORES.format('m')} {HIDE}",
    "shown_before": f"m = Less (column, many)\n {TO_SCORES.format('m')} {SHOW}",
    "hidden_behind": f"m = Greater (column, many)\n {TO_SCORES.format('m')} {HIDE}",
    "shown_up_to": f"m = LessOrEqual (column, many)\n {TO_SCORES.format('m')} {SHOW}",
    "other_way_round": f"m = Greater (many, column)\n {TO_SCORES.format('m')} {SHOW}",
    "negated": f"m = Less (column, many)\n no = Not (m)\n {TO_SCORES.format('no')} {HIDE}",
    "cast": f"m = Less (column, many)\n c = Cast <to = 9> (m)\n {TO_SCORES.format('c')} {SHOW}",
    "added": (
        f"m = Less (column, many)\n {TO_SCORES.format('m')} b = Where (wide, zero, hidden)\n masked = Add (scaled, b)"
    ),
    "narrow_lengths": (
        "narrow = Cast <to = 6> (many)\n c = Cast <to = 6> (column)\n m = Less (c, narrow)\n"
        f" {TO_SCORES.format('m')} {SHOW}"
    ),
    "causal_too": (
        f"m = Less (column, many)\n {TO_SCORES.format('m')} seen = LessOrEqual (j, i)\n"
        " both = And (wide, seen)\n masked = Where (both, scaled, hidden)"
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_lengths_leave_the_mask(name: str) -> None:
    proto = graph(MASKS[name])
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert (site.attributes.has_kv_lengths, site.attributes.has_bias) == (1, 0)
    assert site.attributes.causal == (name == "causal_too")
    q, k, v = numbers({"B": 5, "S": 3, "T": 7})
    for lengths in ([7, 3, 1, 5, 2], [6, 1, 4, 2**40, 3]):
        right, got = (run(p.SerializeToString(), [q, k, v, np.array(lengths)])[0] for p in (proto, fused))
        if name != "narrow_lengths" or max(lengths) < 2**31:  # the graph itself narrows them
            np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)
    none = run(fused.SerializeToString(), [q, k, v, np.array([0, -1, -(2**40), -5, 1])])[0]
    assert np.isfinite(none).all()
    assert not none[1].any()


KEPT = {
    "left_padding": f"m = GreaterOrEqual (column, many)\n {TO_SCORES.format('m')} {SHOW}",
    "every_other": f"twice = Mul (column, i2)\n m = Less (twice, many)\n {TO_SCORES.format('m')} {SHOW}",
    "shifted": f"next = Add (column, i1)\n m = Less (next, many)\n {TO_SCORES.format('m')} {SHOW}",
    "of_each_query": (
        "reach = Add (i, i1)\n m = Less (j, reach)\n p = Less (column, many)\n wide = Unsqueeze (p, heads)\n"
        " any = Or (m, wide)\n masked = Where (any, scaled, hidden)"
    ),
    "finite": f"m = Less (column, many)\n {TO_SCORES.format('m')} masked = Where (wide, scaled, lowest)",
    "bottom_right": (
        f"m = Less (column, many)\n {TO_SCORES.format('m')} shift = Sub (columns, rows)\n last = Add (i, shift)\n"
        " seen = LessOrEqual (j, last)\n both = And (wide, seen)\n masked = Where (both, scaled, hidden)"
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_anything_else_stays_a_bias(name: str) -> None:
    proto = graph(KEPT[name])
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert (site.attributes.has_kv_lengths, site.attributes.has_bias) == (0, 1)
    q, k, v = numbers({"B": 2, "S": 3, "T": 7})
    arrays = [q, k, v, np.array([5, 3])]
    right, got = (run(p.SerializeToString(), arrays)[0] for p in (proto, fused))
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)


def test_lengths_of_each_head_stay_a_bias() -> None:
    mask = "m = Less (column, many)\n masked = Where (m, scaled, hidden)"
    proto = graph(mask, inputs=QKV + ", int64[4] n", before="many = Unsqueeze (n, heads)\n")
    fused, sites = fuse(proto)
    assert only(sites).attributes is not None
    assert only(sites).attributes.has_kv_lengths == 0  # type: ignore[union-attr]
    arrays = [*numbers({"B": 2, "S": 3, "T": 7}), np.array([5, 3, 1, 7])]
    right, got = (run(p.SerializeToString(), arrays)[0] for p in (proto, fused))
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)


def test_lengths_of_the_queries_of_scores_that_stand_keys_first_stay_a_bias() -> None:
    body = (
        "many = Unsqueeze (n, ax1)\n m = Less (row, many)\n wide = Unsqueeze (m, heads)\n"
        "qt = Transpose <perm = [0, 1, 3, 2]> (q)\n scores = MatMul (k, qt)\n"
        "masked = Where (wide, scores, hidden)\n p = Softmax <axis = -2> (masked)\n"
        "probs = Transpose <perm = [0, 1, 3, 2]> (p)\n out = MatMul (probs, v)\n"
    )
    proto = model(LENGTHS + body, inputs=INPUTS, constants=AXES)
    _, sites = fuse(proto)
    assert only(sites).attributes is None or only(sites).attributes.has_kv_lengths == 0  # type: ignore[union-attr]


def test_a_mask_that_is_a_constant_node_is_read_as_any_other() -> None:
    """The older exporter writes a mask that it has baked in as a Constant node, which has no inputs."""
    rows = ", ".join(str(int(j % 3 == i % 2)) for i in range(6) for j in range(6))  # no band that other readers know
    baked = f"m = Constant <value = bool[1, 1, 6, 6] {{{rows}}}> ()\n masked = Where (m, hidden, scaled)"
    fixed = {"inputs": QKV.replace("S", "6").replace("T", "6"), "outputs": "float[B, 4, 6, 8] out"}
    proto = model(PRODUCT + baked + "\n" + REST, **fixed)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    arrays = numbers({"B": 2, "S": 6, "T": 6})
    right, got = (run(p.SerializeToString(), arrays)[0] for p in (proto, fused))
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)
