# SPDX-License-Identifier: Apache-2.0
"""One packed projection becomes FlashAttentionPacked, whichever operators take it apart, and nothing else does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exporter import graphs
from exporter.graphs import PLAIN, fuse, model, only
from exporter.torch_exports import run

HEADS, DEPTH = 3, 5
WIDE = HEADS * DEPTH
CONSTANTS = graphs.CONSTANTS + (
    f", int64[4] split = {{0, 0, {HEADS}, {DEPTH}}}, int64[3] join = {{0, 0, {WIDE}}}, "
    f"int64[4] kv_split = {{0, 0, 1, {DEPTH}}}, "
    f"int64[5] five = {{0, 0, 3, {HEADS}, {DEPTH}}}, int64[5] inner = {{0, 0, {HEADS}, 3, {DEPTH}}}, "
    f"int64[3] equal = {{{WIDE}, {WIDE}, {WIDE}}}, int64[3] grouped = {{{WIDE}, {DEPTH}, {DEPTH}}}, "
    f"int64[1] s0 = {{0}}, int64[1] s1 = {{{WIDE}}}, int64[1] s2 = {{{2 * WIDE}}}, int64[1] s3 = {{{3 * WIDE}}}"
)
HEADS_OF = "".join(f"{n}1 = Reshape ({n}0, split)\n {n} = Transpose <perm = [0, 2, 1, 3]> ({n}1)\n" for n in "qkv")
OF_FIVE = "".join(f"{n} = Gather <axis = 0> (parts, i{i})\n" for i, n in enumerate("qkv"))
END = "back = Transpose <perm = [0, 2, 1, 3]> (out4)\n out = Reshape (back, join)\n"
ATTEND = PLAIN.replace("out =", "out4 =")

APART = {
    "split": "q0, k0, v0 = Split <axis = -1> (x, equal)\n" + HEADS_OF,
    "slice": "q0 = Slice (x, s0, s1, ax2)\n k0 = Slice (x, s1, s2, ax2)\n v0 = Slice (x, s2, s3, ax2)\n" + HEADS_OF,
    "gather": "all = Reshape (x, five)\n parts = Transpose <perm = [2, 0, 3, 1, 4]> (all)\n" + OF_FIVE,
    "five_axes_sliced": "all = Reshape (x, five)\n parts = Transpose <perm = [2, 0, 3, 1, 4]> (all)\n"
    + "".join(
        f"{n}5 = Slice (parts, ax{i}, ax{i + 1}, ax0)\n {n} = Squeeze ({n}5, ax0)\n" for i, n in enumerate("qkv")
    ),
    "split_in_the_middle": "all = Reshape (x, five)\n q5, k5, v5 = Split <axis = 2, num_outputs = 3> (all)\n"
    + "".join(f"{n}4 = Squeeze ({n}5, ax2)\n {n} = Transpose <perm = [0, 2, 1, 3]> ({n}4)\n" for n in "qkv"),
}


def packed_model(apart: str, width: int = 3 * WIDE, attend: str = ATTEND, out: int = WIDE) -> onnx.ModelProto:
    return model(
        apart + attend + END, inputs=f"float[B, S, {width}] x", outputs=f"float[B, S, {out}] out", constants=CONSTANTS
    )


@pytest.mark.parametrize("name", APART)
def test_three_equal_parts_of_one_projection_are_one_packed_node(name: str) -> None:
    proto = packed_model(APART[name])
    fused, sites = fuse(proto)
    assert only(sites).operator == "FlashAttentionPacked"
    assert [n.op_type for n in fused.graph.node] == ["FlashAttentionPacked"]
    assert only(sites).head_dim == DEPTH
    x = np.random.default_rng(1).standard_normal((2, 7, 3 * WIDE)).astype(np.float32)
    right, got = (run(m.SerializeToString(), [x])[0] for m in (proto, fused))
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


def test_one_key_and_value_head_are_packed_after_the_queries() -> None:
    apart = (
        "q0, k0, v0 = Split <axis = -1> (x, grouped)\n q1 = Reshape (q0, split)\n"
        "q = Transpose <perm = [0, 2, 1, 3]> (q1)\n k1 = Reshape (k0, kv_split)\n"
        "k = Transpose <perm = [0, 2, 1, 3]> (k1)\n v1 = Reshape (v0, kv_split)\n "
        "v = Transpose <perm = [0, 2, 1, 3]> (v1)\n"
    )
    proto = packed_model(apart, width=WIDE + 2 * DEPTH)
    fused, sites = fuse(proto)
    assert only(sites).operator == "FlashAttentionPacked"
    assert (only(sites).attributes.q_num_heads, only(sites).attributes.kv_num_heads) == (HEADS, 1)  # type: ignore
    x = np.random.default_rng(2).standard_normal((2, 7, WIDE + 2 * DEPTH)).astype(np.float32)
    right, got = (run(m.SerializeToString(), [x])[0] for m in (proto, fused))
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


NOT_PACKED = {
    "another_order": "k0, q0, v0 = Split <axis = -1> (x, equal)\n" + HEADS_OF,
    "interleaved": "all = Reshape (x, inner)\n parts = Transpose <perm = [3, 0, 2, 1, 4]> (all)\n" + OF_FIVE,
    "one_part_twice": "q0, k0, v9 = Split <axis = -1> (x, equal)\n v0 = Identity (k0)\n" + HEADS_OF,
}


@pytest.mark.parametrize("name", NOT_PACKED)
def test_parts_in_another_order_are_fused_but_not_as_packed(name: str) -> None:
    proto = packed_model(NOT_PACKED[name])
    fused, sites = fuse(proto)
    assert only(sites).operator == "FlashAttention"
    x = np.random.default_rng(3).standard_normal((2, 7, 3 * WIDE)).astype(np.float32)
    right, got = (run(m.SerializeToString(), [x])[0] for m in (proto, fused))
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


def test_a_bias_or_a_scaled_query_is_kept_beside_a_packed_projection() -> None:
    lines = graphs.PRODUCT + "masked = Add (scaled, m)\n" + graphs.REST.replace("out =", "out4 =")
    proto = model(
        APART["split"] + lines + END,
        inputs=f"float[B, S, {3 * WIDE}] x, float[S, S] m",
        outputs=f"float[B, S, {WIDE}] out",
        constants=CONSTANTS,
    )
    fused, sites = fuse(proto)
    assert only(sites).operator == "FlashAttentionEx"
    random = np.random.default_rng(4)
    inputs = [random.standard_normal(s).astype(np.float32) for s in ((2, 7, 3 * WIDE), (7, 7))]
    right, got = (run(m.SerializeToString(), inputs)[0] for m in (proto, fused))
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)
    scaled = APART["gather"].replace(
        "q = Gather <axis = 0> (parts, i0)", "qq = Gather <axis = 0> (parts, i0)\n q = Mul (qq, scale)"
    )
    fused, sites = fuse(packed_model(scaled))
    assert only(sites).operator == "FlashAttentionPacked"
    assert only(sites).attributes.scale == 0.25  # type: ignore[union-attr]
