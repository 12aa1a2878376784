# SPDX-License-Identifier: Apache-2.0
"""The node's layout, heads and type are those that leave the least around it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from contract.reference import attention as reference
from exporter import graphs
from exporter.graphs import (
    HEADS,
    JOIN,
    PLAIN,
    PROJECTED,
    SHAPES,
    SPLIT_HEADS,
    both,
    code,
    fuse,
    model,
    numbers,
    only,
)
from exporter.torch_exports import run
from onnx.reference import ReferenceEvaluator

from flash_export.plan import MAX_HEAD_DIM


def test_separate_projections_give_layout_0_and_no_transpose_stays() -> None:
    body = HEADS + SPLIT_HEADS + PLAIN.replace("out =", "out4 =") + JOIN
    proto = model(body, inputs=PROJECTED, outputs="float[B, S, 32] out", constants=SHAPES)
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.attributes is not None
    assert site.attributes.layout == 0
    assert sorted(n.op_type for n in fused.graph.node) == ["FlashAttention", "MatMul", "MatMul", "MatMul"]
    assert set(site.boundary) == {"q0", "k0", "v0"}
    assert (site.query_source, site.key_source, site.output) == ("q0", "k0", "out")
    x, *w = (
        np.random.default_rng(i).standard_normal(s).astype(np.float32) * 0.4
        for i, s in enumerate([(2, 5, 32)] + [(32, 32)] * 3)
    )
    expected, got = both(proto, fused, [x, *w])
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_three_slices_of_one_packed_projection_stay_in_layout_1_beside_a_bias() -> None:
    body = "p = MatMul (x, w)\n q0, k0, v0 = Split <axis = 2, num_outputs = 3> (p)\n" + SPLIT_HEADS
    body += graphs.PRODUCT + "masked = Add (scaled, m)\n" + graphs.REST.replace("out =", "out4 =") + JOIN
    inputs = "float[B, S, 32] x, float[32, 96] w, float[S] m"
    proto = model(body, inputs=inputs, outputs="float[B, S, 32] out", constants=SHAPES)
    fused, sites = fuse(proto)
    assert only(sites).attributes is not None
    assert only(sites).attributes.layout == 1
    random = np.random.default_rng(3)
    inputs = [random.standard_normal(s).astype(np.float32) * 0.5 for s in ((3, 7, 32), (32, 96), (7,))]
    expected, got = both(proto, fused, inputs)
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_three_dimensional_attention_is_fused_as_one_head() -> None:
    body = (
        "kt = Transpose <perm = [0, 2, 1]> (k)\n s = MatMul (q, kt)\n scores = Mul (s, scale)\n"
        "biased = Add (scores, m)\n probs = Softmax <axis = -1> (biased)\n out = MatMul (probs, v)\n"
    )
    proto = model(
        body,
        inputs="float[N, S, 8] q, float[N, T, 8] k, float[N, T, 5] v, float[N, 1, T] m",
        outputs="float[N, S, 5] out",
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.attributes is not None
    assert (site.attributes.q_num_heads, site.attributes.layout, site.v_head_dim) == (1, 0, 5)
    random = np.random.default_rng(4)
    inputs = [random.standard_normal(s).astype(np.float32) for s in ((6, 5, 8), (6, 7, 8), (6, 7, 5), (6, 1, 7))]
    expected, got = both(proto, fused, inputs)
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_one_key_head_for_all_queries_is_multi_query_without_an_expand() -> None:
    proto = model(PLAIN, inputs="float[B, 4, S, 8] q, float[B, 1, T, 8] k, float[B, 1, T, 8] v")
    fused, sites = fuse(proto)
    assert only(sites).attributes is not None
    assert (only(sites).attributes.q_num_heads, only(sites).attributes.kv_num_heads) == (4, 1)
    q, k, v = numbers({"B": 2, "S": 5, "T": 7})
    expected, got = both(proto, fused, [q, k[:, :1], v[:, :1]])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_tiled_key_heads_are_not_mistaken_for_groups() -> None:
    """repeat() puts head h beside h + Hkv; a group would put it beside h."""
    body = (
        "k5 = Unsqueeze (k2, ax1)\n ke = Expand (k5, five)\n k = Reshape (ke, four)\n"
        "v5 = Unsqueeze (v2, ax1)\n ve = Expand (v5, five)\n v = Reshape (ve, four)\n" + PLAIN
    )
    proto = model(
        body,
        inputs="float[2, 4, 5, 8] q, float[2, 2, 7, 8] k2, float[2, 2, 7, 8] v2",
        outputs="float[2, 4, 5, 8] out",
        constants=graphs.CONSTANTS + ", int64[5] five = {2, 2, 2, 7, 8}, int64[4] four = {2, 4, 7, 8}",
    )
    fused, sites = fuse(proto)
    assert only(sites).status == "fused"
    assert only(sites).attributes.kv_num_heads == 4  # type: ignore[union-attr]
    q, k, v = numbers({"B": 2, "S": 5, "T": 7})
    expected, got = both(proto, fused, [q, k[:, :2], v[:, :2]])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("query", "key", "value", "kv_heads", "expands"),
    [
        ("1, 4, S, 8", "3, 4, T, 8", "3, 4, T, 8", 4, 1),
        ("1, 4, S, 8", "B, 4, T, 8", "B, 4, T, 8", 4, 1),
        ("4, S, 8", "B, 4, T, 8", "B, 4, T, 8", 4, 1),
        ("B, 1, S, 8", "B, 4, T, 8", "B, 4, T, 8", 4, 1),
        ("B, 4, S, 8", "1, 4, T, 8", "1, 4, T, 8", 4, 2),
        ("B, 4, S, 8", "1, 4, T, 8", "B, 4, T, 8", 4, 1),
        ("B, 4, S, 8", "B, 4, T, 8", "4, T, 8", 4, 1),
        ("B, 4, S, 8", "B, 1, T, 8", "B, 4, T, 8", 4, 1),
        ("B, 4, S, 8", "1, 1, T, 8", "1, 1, T, 8", 1, 2),
        ("B, 4, S, 8", "B, 1, T, 8", "B, 1, T, 8", 1, 0),
    ],
)
def test_an_operand_that_the_product_broadcasts_is_expanded(
    query: str, key: str, value: str, kv_heads: int, expands: int
) -> None:
    """Queries that are learned and shared by the batch, a memory that all read, heads that only K shares."""
    batch = "3" if "3" in key else "B"
    inputs = f"float[{query}] q, float[{key}] k, float[{value}] v"
    proto = model(PLAIN, inputs=inputs, outputs=f"float[{batch}, 4, S, 8] out")
    fused, sites = fuse(proto)
    assert only(sites).status == "fused"
    assert only(sites).attributes.kv_num_heads == kv_heads  # type: ignore[union-attr]
    assert [node.op_type for node in fused.graph.node].count("Expand") == expands
    sizes = {"B": 3, "S": 5, "T": 7}
    shapes = [[sizes.get(d) or int(d) for d in dims.split(", ")] for dims in (query, key, value)]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    expected, got = both(proto, fused, arrays)
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize(("cut", "expands"), [("q", 1), ("k", 1), ("v", 1), ("kv", 2), ("qkv", 0)])
@pytest.mark.parametrize("bounds", [(0, 1), (-1, 2**63 - 1)])
def test_an_operand_that_is_the_first_or_last_of_its_batch_is_expanded(
    cut: str, expands: int, bounds: tuple[int, int]
) -> None:
    """The node takes no batch of one beside one of many, however the product comes by it."""
    body = PLAIN
    for name in cut:
        body = (
            body.replace(f"({name})", f"({name}1)")
            .replace(f"({name},", f"({name}1,")
            .replace(f", {name})", f", {name}1)")
        )
        body = f"{name}1 = Slice ({name}, from, to, ax0)\n" + body
    constants = graphs.CONSTANTS + f", int64[1] from = {{{bounds[0]}}}, int64[1] to = {{{bounds[1]}}}"
    proto = model(body, constants=constants, outputs="float[N, 4, S, 8] out")
    fused, sites = fuse(proto)
    assert only(sites).status == "fused"
    assert [node.op_type for node in fused.graph.node].count("Expand") == expands
    expected, got = both(proto, fused, numbers({"B": 3, "S": 5, "T": 7}))
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_value_that_is_expanded_may_be_made_after_the_softmax() -> None:
    body = PLAIN.replace("out = MatMul (probs, v)", "late = Relu (v)\n out = MatMul (probs, late)")
    assert "late" in body
    inputs = "float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[1, 4, T, 8] v"
    proto = model(body, inputs=inputs)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused"
    q, k, v = numbers({"B": 3, "S": 5, "T": 7})
    expected, got = both(proto, fused, [q, k, v[:1]])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_query_that_an_expand_gave_its_batch_needs_no_other() -> None:
    body = "qe = Expand (q, five)\n" + PLAIN.replace("(q,", "(qe,")
    constants = graphs.CONSTANTS + ", int64[4] five = {3, 1, 1, 1}"
    inputs = "float[1, 4, S, 8] q, float[3, 4, T, 8] k, float[3, 4, T, 8] v"
    fused, sites = fuse(model(body, inputs=inputs, outputs="float[3, 4, S, 8] out", constants=constants))
    assert only(sites).status == "fused"
    assert [node.op_type for node in fused.graph.node] == ["Expand", "FlashAttention"]


def test_a_query_that_an_einsum_broadcasts_is_refused() -> None:
    body = PLAIN.replace("MatMul (q, kt)", 'Einsum <equation = "hsd,bhdt->bhst"> (q, kt)')
    assert "Einsum" in body
    inputs = "float[4, S, 8] q, float[3, 4, T, 8] k, float[3, 4, T, 8] v"
    assert code(model(body, inputs=inputs, outputs="float[3, 4, S, 8] out")) == "query_broadcast"


def test_scores_in_fp32_between_casts_become_one_fp16_node() -> None:
    inputs = "float16[B, 4, S, 8] q16, float16[B, 4, T, 8] k16, float16[B, 4, T, 8] v16"
    body = "q = Cast <to = 1> (q16)\n k = Cast <to = 1> (k16)\n" + graphs.PRODUCT
    body += "p = Softmax <axis = -1> (scaled)\n p16 = Cast <to = 10> (p)\n out = MatMul (p16, v16)\n"
    proto = model(body, inputs=inputs, outputs="float16[B, 4, S, 8] out")
    fused, sites = fuse(proto)
    assert [n.op_type for n in fused.graph.node] == ["FlashAttention"]
    assert set(only(sites).boundary) == {"q16", "k16", "v16"}
    half = [x.astype(np.float16) for x in numbers({"B": 2, "S": 5, "T": 7})]
    expected, got = both(proto, fused, half)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), atol=4e-3, rtol=0)


def test_scores_beyond_the_range_of_fp16_are_finite_in_the_node() -> None:
    """The kernel and the body accumulate in fp32; the graph read to the letter gives NaN."""
    proto = model(
        PLAIN,
        inputs=graphs.QKV.replace("float", "float16"),
        outputs=graphs.OUT.replace("float", "float16"),
        constants=graphs.CONSTANTS.replace("float scale = {0.5}", "float16 scale = {14336}"),
    )
    fused, _ = fuse(proto)
    q, k, v = (x.astype(np.float16) for x in numbers({"B": 2, "S": 5, "T": 7}))
    inputs = [q * 120, k * 120, v]
    with np.errstate(all="ignore"):
        literal = ReferenceEvaluator(proto).run(None, dict(zip("qkv", inputs, strict=True)))[0]
    assert np.isnan(literal).any()
    got = run(fused.SerializeToString(), inputs)[0]
    right = reference(*(x.astype(np.float64) for x in inputs), scale=0.5)[0]
    np.testing.assert_allclose(got.astype(np.float64), right, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("place", "depth"), [("query", 257), ("value", 264)])
def test_a_head_dim_that_no_kernel_takes_is_refused(place: str, depth: int) -> None:
    inputs = graphs.QKV
    if place == "query":
        inputs = inputs.replace("8] q", f"{depth}] q").replace("8] k", f"{depth}] k")
    else:
        inputs = inputs.replace("8] v", f"{depth}] v")
    outputs = graphs.OUT.replace("8]", f"{depth}]") if place == "value" else graphs.OUT
    assert code(model(PLAIN, inputs=inputs, outputs=outputs)) == "head_dim_large"


def test_the_largest_head_dim_is_that_of_the_kernels(repo_root: Path) -> None:
    lines = (repo_root / "plugin" / "kernels" / "variants.inc").read_text()
    assert max(int(n) for n in re.findall(r"^FLASH_VARIANT\(\w+, (\d+),", lines, re.MULTILINE)) == MAX_HEAD_DIM


def test_a_graph_that_goes_on_in_fp32_keeps_its_fp32_result() -> None:
    inputs = "float16[B, 4, S, 8] q16, float16[B, 4, T, 8] k16, float16[B, 4, T, 8] v16"
    body = "".join(f"{n} = Cast <to = 1> ({n}16)\n" for n in "qkv") + PLAIN
    fused, sites = fuse(model(body, inputs=inputs))
    assert only(sites).status == "fused"
    assert set(only(sites).boundary) == {"q", "k", "v"}
    assert fused.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


SCALES = {
    "scores": "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n s = MatMul (q, kt)\n x = Mul (s, a)\n",
    "divided": "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n s = MatMul (q, kt)\n x = Div (s, four)\n",
    "query": "qs = Mul (a, q)\n kt = Transpose <perm = [0, 1, 3, 2]> (k)\n x = MatMul (qs, kt)\n",
    "both": (
        "qs = Mul (q, half)\n kt = Transpose <perm = [0, 1, 3, 2]> (k)\n ks = Mul (kt, half)\n x = MatMul (qs, ks)\n"
    ),
    "key before its transpose": "ks = Div (k, four)\n kt = Transpose <perm = [0, 1, 3, 2]> (ks)\n x = MatMul (q, kt)\n",
    "three places": (
        "qs = Mul (q, half)\n kt = Transpose <perm = [0, 1, 3, 2]> (k)\n s = MatMul (qs, kt)\n t = Mul (s, four)\n"
        "x = Div (t, eight)\n"
    ),
    "from the head dim": (
        "shape = Shape (q)\n last = Gather (shape, i3)\n f = Cast <to = 1> (last)\n"
        "twice = Mul (f, two)\n r = Sqrt (twice)\n"
        "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n s = MatMul (q, kt)\n x = Div (s, r)\n"
    ),
}


@pytest.mark.parametrize("place", SCALES)
def test_the_scale_is_one_number_wherever_the_graph_keeps_it(place: str) -> None:
    """Each program scales by 1/4 in all; D is 8, so that neither 1/sqrt(D) nor a half-read scale fits."""
    numbers_used = "float a = {0.25}, float half = {0.5}, float four = {4.0}, float eight = {8.0}, float two = {2.0}"
    proto = model(
        SCALES[place] + "probs = Softmax <axis = -1> (x)\n out = MatMul (probs, v)\n",
        constants=numbers_used + ", int64 i3 = {3}",
    )
    fused, sites = fuse(proto)
    assert only(sites).attributes is not None
    assert only(sites).attributes.scale == pytest.approx(0.25, rel=1e-6)
    assert [n.op_type for n in fused.graph.node] == ["FlashAttention"]
    expected, got = both(proto, fused, [3 * x for x in numbers({"B": 2, "S": 5, "T": 7})])
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 3])
def test_a_cache_joined_by_concat_stays_outside_and_its_present_outputs_stay(length: int) -> None:
    body = (
        "k = Concat <axis = 2> (past_k, new_k)\n v = Concat <axis = 2> (past_v, new_v)\n"
        "q_shape = Shape (q)\n k_shape = Shape (k)\n rows = Gather (q_shape, i2)\n columns = Gather (k_shape, i2)\n"
        "row = Range (i0, rows, i1)\n past = Sub (columns, rows)\n at = Add (row, past)\n"
        "column = Range (i0, columns, i1)\n"
        "i = Unsqueeze (at, ax1)\n j = Unsqueeze (column, ax0)\n keep = LessOrEqual (j, i)\n"
        + graphs.PRODUCT
        + "masked = Where (keep, scaled, hidden)\n"
        + graphs.REST
    )
    new = "float[B, 4, S, 8]"
    old = "float[B, 4, P, 8]"
    proto = model(
        body,
        inputs=f"{new} q, {new} new_k, {new} new_v, {old} past_k, {old} past_v",
        outputs=f"{new} out, float[B, 4, T, 8] k, float[B, 4, T, 8] v",
    )
    fused, sites = fuse(proto)
    assert only(sites).attributes is not None
    assert only(sites).attributes.causal_kind == "bottom_right"
    assert only(sites).bias_shape is None
    assert sorted(n.op_type for n in fused.graph.node) == ["Concat", "Concat", "FlashAttention"]
    random = np.random.default_rng(8)
    lengths = (length, length, length, 5, 5)
    inputs = [random.standard_normal((2, 4, n, 8)).astype(np.float32) for n in lengths]
    expected, got = both(proto, fused, inputs)
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_query_rotated_before_the_product_is_read_after_the_rotation() -> None:
    body = (
        "left, right = Split <axis = -1, num_outputs = 2> (q0)\n minus = Neg (right)\n"
        "turned = Concat <axis = -1> (minus, left)\n"
        "a = Mul (q0, cos)\n b = Mul (turned, sin)\n q = Add (a, b)\n" + PLAIN
    )
    proto = model(body, inputs=graphs.QKV.replace(" q,", " q0,") + ", float[S, 8] cos, float[S, 8] sin")
    fused, sites = fuse(proto)
    assert only(sites).query_source == "q"
    angles = np.linspace(0, 1, 40, dtype=np.float32).reshape(5, 8)
    inputs = [*numbers({"B": 2, "S": 5, "T": 7}), np.cos(angles), np.sin(angles)]
    expected, got = both(proto, fused, inputs)
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_dropout_that_is_off_vanishes() -> None:
    proto = model(
        graphs.PRODUCT + "p = Softmax <axis = -1> (scaled)\n probs, m = Dropout (p)\n out = MatMul (probs, v)\n"
    )
    assert [n.op_type for n in fuse(proto)[0].graph.node] == ["FlashAttention"]


def test_learned_queries_are_queries() -> None:
    proto = model(
        "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n scores = MatMul (learned, kt)\n"
        "probs = Softmax <axis = -1> (scores)\n out = MatMul (probs, v)\n",
        inputs="float[1, 4, T, 8] k, float[1, 4, T, 8] v, float[1, 4, 5, 8] learned",
        outputs="float[1, 4, 5, 8] out",
    )
    q, k, v = numbers({"B": 1, "S": 5, "T": 7})
    proto.graph.input.remove(proto.graph.input[2])
    proto.graph.initializer.append(onnx.numpy_helper.from_array(q, "learned"))
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused"
    assert site.query_source is None
    assert set(site.boundary) == {"k", "v"}
    expected, got = both(proto, fused, [k, v])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)
