# SPDX-License-Identifier: Apache-2.0
"""A mask of data hides in every row exactly what it hid before; its causal part may become an attribute."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from contract.reference import attention as reference
from contract.tolerance import unfused, why_rejected
from exporter import graphs
from exporter.graphs import SIZES, attention, both, causal, fuse, numbers, only, padding

from flash_export.mask_terms import Literal as Part
from flash_export.mask_terms import conjuncts

PADDING = "keep = LessOrEqual (j, i)\n wide = Unsqueeze (pad, twice)\n kept = And (keep, wide)\n"
PAD_INPUTS = graphs.QKV + ", bool[B, T] pad"
PAD_CONSTANTS = graphs.CONSTANTS + ", int64[2] twice = {1, 2}"
GUARD = (
    "probs0 = Softmax <axis = -1> (masked)\n nan = IsNaN (probs0)\n probs = Where (nan, zero, probs0)\n"
    "out = MatMul (probs, v)\n"
)


def left_padding(sizes: dict[str, int]) -> np.ndarray:
    pad = np.ones((sizes["B"], sizes["T"]), bool)
    pad[-1, : sizes["T"] // 2 + 1] = False
    return pad


def test_padding_times_causal_with_minus_infinity_is_split_and_nothing_square_is_built() -> None:
    lines = PADDING + "bias = Where (kept, zero, hidden)\n masked = Add (scaled, bias)\n"
    proto = graphs.model(graphs.LENGTHS + graphs.PRODUCT + lines + GUARD, inputs=PAD_INPUTS, constants=PAD_CONSTANTS)
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "top_left"
    assert only(sites).bias_shape == ["B", 1, 1, "T"]
    assert "LessOrEqual" not in [n.op_type for n in fused.graph.node]
    for sizes in SIZES:
        expected, got = both(proto, fused, [*numbers(sizes), left_padding(sizes)])
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_padding_times_causal_with_a_finite_fill_stays_one_tensor() -> None:
    """A wholly masked row is the mean of V over all keys, which an exact causal mask would cut short."""
    proto = attention(
        PADDING + "bias = Where (kept, zero, lowest)\n masked = Add (scaled, bias)",
        inputs=PAD_INPUTS,
        constants=PAD_CONSTANTS,
    )
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "none"
    assert only(sites).bias_shape == ["B", 1, "S", "T"]
    for sizes in SIZES:
        inputs = [*numbers(sizes), left_padding(sizes)]
        expected, got = both(proto, fused, inputs)
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)
        first = got[-1, :, 0]
        np.testing.assert_allclose(first, inputs[2][-1].mean(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lines", "masked_row"),
    [
        ("bias = Where (m, zero, hidden)\n masked = Add (scaled, bias)\n" + GUARD, "zero"),
        ("masked = Where (m, scaled, hidden)\n" + GUARD, "zero"),
        ("masked = Where (m, scaled, hidden)\n" + graphs.REST, "zero where the graph gave NaN"),
        ("bias = Where (m, zero, lowest)\n masked = Add (scaled, bias)\n" + graphs.REST, "mean"),
        ("masked = Where (m, scaled, lowest)\n" + graphs.REST, "mean"),
        ("bias = Where (m, zero, some)\n masked = Add (scaled, bias)\n" + graphs.REST, "the scores"),
    ],
)
def test_what_a_fully_masked_row_gives_depends_on_the_graph(lines: str, masked_row: str) -> None:
    proto = graphs.model(
        graphs.PRODUCT + lines,
        inputs=graphs.QKV + ", bool[B, 1, S, T] m",
        constants=graphs.CONSTANTS + ", float some = {-1e4}",
    )
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    sizes = {"B": 2, "S": 5, "T": 7}
    mask = np.random.default_rng(1).random((2, 1, 5, 7)) < 0.7
    mask[0, 0, 2] = False
    q, k, v = numbers(sizes)
    expected, got = both(proto, fused, [q, k, v, mask])
    row = got[0, :, 2]
    if masked_row.startswith("zero"):
        assert (row == 0).all()
        assert np.isnan(expected[0, :, 2]).all() == (masked_row != "zero")
        expected = np.nan_to_num(expected)
    if masked_row == "mean":
        np.testing.assert_allclose(row, v[0].mean(1), atol=1e-5, rtol=0)
    if masked_row == "the scores":
        plain = reference(q, k, v, scale=0.5)[0]
        np.testing.assert_allclose(row, plain[0, :, 2], atol=2e-3, rtol=0)
    # -1e4 + s is rounded at 1e-3 in fp32, in both graphs by another order of operations.
    np.testing.assert_allclose(got, expected, atol=2e-3 if masked_row == "the scores" else 3e-6, rtol=0)


@pytest.mark.parametrize(
    "lines",
    [
        "masked = Where (hide, hidden, scaled)\n",
        "masked = Where (hide, lowest, scaled)\n",
        "bias = Where (hide, hidden, zero)\n masked = Add (bias, scaled)\n",
        "late = Greater (j, i)\n either = Or (late, hide)\n masked = Where (either, hidden, scaled)\n",
    ],
)
def test_a_mask_that_is_true_where_keys_are_hidden_hides_those(lines: str) -> None:
    proto = attention(lines, inputs=graphs.QKV + ", bool[B, 1, 1, T] hide")
    fused, sites = fuse(proto)
    assert only(sites).bias_shape == ["B", 1, 1, "T"]
    assert causal(only(sites)) == ("top_left" if "late" in lines else "none")
    for sizes in SIZES[:3]:
        hide = np.zeros((sizes["B"], 1, 1, sizes["T"]), bool)
        hide[..., sizes["T"] // 2 + 1 :] = True
        expected, got = both(proto, fused, [*numbers(sizes), hide])
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


SHAPES = {
    "T": "[T]",
    "ST": "[S, T]",
    "111T": "[1, 1, 1, T]",
    "B11T": "[B, 1, 1, T]",
    "B1ST": "[B, 1, S, T]",
    "HST": "[4, S, T]",
    "BHST": "[B, 4, S, T]",
    "BH11": "[B, 4, 1, 1]",
    "scalar": "[]",
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_mask_of_any_broadcastable_shape_is_handed_over_as_it_is(name: str, kind: str) -> None:
    declared = f"{kind}{SHAPES[name]} m" if name != "scalar" else f"{kind} m"
    lines = {
        "bool": "bias = Where (m, zero, lowest)\n masked = Add (bias, scaled)",
        "float": "masked = Add (scaled, m)",
    }[kind]
    proto = attention(lines, inputs=graphs.QKV + ", " + declared)
    fused, sites = fuse(proto)
    assert only(sites).operator == "FlashAttentionEx"
    letters = [x.strip() for x in SHAPES[name].strip("[]").split(",") if x.strip()]
    expected_shape = [int(x) if x.isdigit() else x for x in letters]
    assert only(sites).bias_shape == [1] * (4 - len(letters)) + expected_shape
    for sizes in SIZES[:3]:
        shape = [sizes.get(str(x), x) for x in expected_shape]
        random = np.random.default_rng(5)
        mask = random.random(shape) < 0.6 if kind == "bool" else random.standard_normal(shape).astype(np.float32)
        mask = np.asarray(mask, bool if kind == "bool" else np.float32)
        q, k, v = numbers(sizes)
        got = both(proto, fused, [q, k, v, mask])[1]
        bias = np.where(mask, np.float32(0), np.finfo(np.float32).min) if kind == "bool" else mask
        bias = bias.reshape([1] * (4 - bias.ndim) + list(bias.shape)).astype(np.float32)
        right = reference(q, k, v, scale=0.5, bias=bias)[0]
        assert why_rejected(got, right, unfused(q, k, v, scale=0.5, bias=bias)) == []


def test_a_mask_that_would_enlarge_the_output_is_refused() -> None:
    proto = attention(
        "bias = Where (m, zero, hidden)\n masked = Add (scaled, bias)",
        inputs="float[1, 4, S, 8] q, float[1, 4, T, 8] k, float[1, 4, T, 8] v, bool[3, 1, S, T] m",
        outputs="float[3, 4, S, 8] out",
    )
    site = only(fuse(proto)[1])
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.code == "bias_shape"


def test_a_sum_of_a_causal_mask_and_data_gives_an_attribute_and_a_tensor() -> None:
    proto = attention(
        "keep = LessOrEqual (j, i)\n c = Where (keep, zero, hidden)\n both = Add (c, m)\n masked = Add (scaled, both)",
        inputs=graphs.QKV + ", float[B, 1, 1, T] m",
    )
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "top_left"
    assert only(sites).bias_shape == ["B", 1, 1, "T"]
    for sizes in SIZES[:3]:
        mask = np.random.default_rng(2).standard_normal((sizes["B"], 1, 1, sizes["T"])).astype(np.float32)
        expected, got = both(proto, fused, [*numbers(sizes), mask])
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_lowest_causal_fill_beside_data_that_may_hide_a_row_stays_a_tensor() -> None:
    proto = attention(
        "keep = LessOrEqual (j, i)\n c = Where (keep, zero, lowest)\n part = Add (scaled, c)\n masked = Add (part, m)",
        inputs=graphs.QKV + ", float[B, 1, 1, T] m",
    )
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "none"
    sizes = SIZES[0]
    mask = np.zeros((2, 1, 1, 7), np.float32)
    mask[1, ..., :4] = -1e9
    expected, got = both(proto, fused, [*numbers(sizes), mask])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_conjuncts_go_through_not_and_or_but_not_through_or_of_visible_parts() -> None:
    proto = graphs.model(
        "a = Not (x)\n b = Or (a, y)\n c = Not (b)\n d = Or (x, y)\n",
        inputs="bool[S, T] x, bool[S, T] y",
        outputs="bool[S, T] c, bool[S, T] d",
    )
    converted = ir.from_proto(proto)
    values = {v.name: v for n in converted.graph for v in n.outputs}
    parts = conjuncts(Part(values["c"], True))  # not (not x or y) = x and not y
    assert [(p.value.name, p.keep) for p in parts] == [("x", True), ("y", False)]
    assert [p.value.name for p in conjuncts(Part(values["d"], True))] == ["d"]


@pytest.mark.parametrize("inner", ["lowest", "hidden"])
@pytest.mark.parametrize("form", ["masked", "added"])
def test_an_outer_finite_fill_takes_the_place_of_an_inner_one(inner: str, form: str) -> None:
    """A row whose keys are all padded weighs every padded key alike, also those that the causal mask hid before."""
    lines = {
        "masked": f"first = Where (keep, scaled, {inner})\n",
        "added": f"c = Where (keep, zero, {inner})\n first = Add (scaled, c)\n",
    }[form]
    proto = attention(
        f"keep = LessOrEqual (j, i)\n {lines} masked = Where (pad, lowest, first)",
        inputs=graphs.QKV + ", bool[B, 1, 1, T] pad",
    )
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "none"
    for sizes in SIZES:
        pad = np.zeros((sizes["B"], 1, 1, sizes["T"]), bool)
        pad[..., : sizes["T"] // 2 + 1] = True
        expected, got = both(proto, fused, [*numbers(sizes), pad])
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_minus_infinity_around_a_finite_fill_leaves_the_causal_part_an_attribute() -> None:
    proto = attention(
        "keep = LessOrEqual (j, i)\n first = Where (pad, lowest, scaled)\n masked = Where (keep, first, hidden)",
        inputs=graphs.QKV + ", bool[B, 1, 1, T] pad",
    )
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "top_left"
    assert only(sites).bias_shape == ["B", 1, 1, "T"]
    for sizes in SIZES:
        pad = np.zeros((sizes["B"], 1, 1, sizes["T"]), bool)
        pad[..., : sizes["T"] // 2 + 1] = True
        expected, got = both(proto, fused, [*numbers(sizes), pad])
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_scale_that_grows_with_the_length_multiplies_q() -> None:
    """max(1, log(T) / log(512)) is 1 at every length that a quick test would try."""
    lines = (
        "f = Cast <to = 1> (columns)\n l = Log (f)\n d = Div (l, log512)\n r = Max (d, one)\n masked = Mul (scaled, r)"
    )
    proto = attention(lines, constants=graphs.CONSTANTS + ", float log512 = {6.2383246}, float one = {1}")
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    for sizes in ({"B": 1, "S": 5, "T": 7}, {"B": 1, "S": 5, "T": 1300}):
        q, k, v = numbers(sizes)
        expected, got = both(proto, fused, [q * 3, k * 3, v])
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


def test_a_tanh_of_a_tanh_is_no_soft_cap() -> None:
    proto = attention(
        "a = Tanh (scaled)\n b = Tanh (a)\n masked = Mul (b, five)", constants=graphs.CONSTANTS + ", float five = {5}"
    )
    assert graphs.code(proto) == "softcap_form"


def test_a_sum_of_causal_and_padding_that_torch_reshapes_is_split() -> None:
    """nn.TransformerEncoder adds both masks over batch times heads and views the sum as four axes afterwards."""
    proto = attention(
        "keep = LessOrEqual (j, i)\n c = Where (keep, zero, hidden)\n c3 = Unsqueeze (c, ax0)\n"
        "m4 = Unsqueeze (m, twice)\n b = Shape <start = 0, end = 1> (q)\n t = Shape <start = 1, end = 2> (m)\n"
        "s = Shape <start = 2, end = 3> (q)\n wide = Concat <axis = 0> (b, four, ax1, t)\n m5 = Expand (m4, wide)\n"
        "bh = Mul (b, four)\n three = Concat <axis = 0> (bh, ax1, t)\n m3 = Reshape (m5, three)\n"
        "sum = Add (c3, m3)\n full = Concat <axis = 0> (b, four, s, t)\n sum4 = Reshape (sum, full)\n"
        "masked = Add (scaled, sum4)",
        inputs=graphs.QKV + ", float[B, T] m",
        constants=PAD_CONSTANTS + ", int64[1] four = {4}",
    )
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "top_left"
    assert only(sites).bias_shape == ["B", 1, 1, "T"]
    for sizes in SIZES:
        mask = np.where(left_padding(sizes)[:, ::-1], 0, -np.inf).astype(np.float32)
        expected, got = both(proto, fused, [*numbers(sizes), mask])
        seen = np.isfinite(expected)  # keyless rows: NaN unfused, 0 fused
        np.testing.assert_allclose(got[seen], expected[seen], atol=3e-6, rtol=0)
        assert (got[~seen] == 0).all()


def test_a_mask_that_reads_itself_twice_at_every_node_is_read_once_a_node() -> None:
    """2^40 readings would never end."""
    lines = "".join(f"n{i + 1} = And (n{i}, n{i})\n" for i in range(40))
    proto = attention(f"{lines} masked = Where (n40, scaled, hidden)", inputs=graphs.QKV + ", bool[B, 1, 1, T] n0")
    assert only(fuse(proto)[1]).bias_shape == ["B", 1, 1, "T"]
    lines = "".join(f"c{i + 1} = Add (c{i}, c{i})\n" for i in range(40))
    proto = attention(
        f"keep = LessOrEqual (j, i)\n c0 = Where (keep, zero, hidden)\n {lines} masked = Add (scaled, c40)"
    )
    assert causal(only(fuse(proto)[1])) == "top_left"


def test_a_bias_from_which_the_scores_are_subtracted_is_a_bias_and_a_negative_scale() -> None:
    proto = attention("masked = Sub (m, scaled)", inputs=graphs.QKV + ", float[B, 1, 1, T] m")
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    assert only(sites).attributes is not None
    assert only(sites).attributes.scale == -0.5
    mask = np.random.default_rng(4).standard_normal((2, 1, 1, 7)).astype(np.float32)
    expected, got = both(proto, fused, [*numbers(SIZES[0]), mask])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    "lines",
    [
        "masked = Where (pad, some, scaled)",
        "keep = LessOrEqual (j, i)\n first = Where (keep, scaled, some)\n masked = Where (pad, some, first)",
        "keep = LessOrEqual (j, i)\n first = Where (keep, scaled, hidden)\n masked = Where (pad, some, first)",
    ],
)
@pytest.mark.parametrize("fill", ["-1e9", "-65504"])
def test_a_single_number_that_replaces_scores_gives_the_mean_of_v_where_every_key_is_hidden(
    lines: str, fill: str
) -> None:
    proto = attention(
        lines,
        inputs=graphs.QKV + ", bool[B, 1, 1, T] pad",
        constants=f"{graphs.CONSTANTS}, float some = {{{fill}}}",
    )
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    for sizes in SIZES:
        pad = padding(sizes)
        q, k, v = numbers(sizes)
        expected, got = both(proto, fused, [q * 4, k * 4, v, pad])
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


def test_a_number_that_replaces_scores_before_a_bias_is_refused() -> None:
    proto = attention(
        "first = Where (pad, some, scaled)\n masked = Add (first, m)",
        inputs=graphs.QKV + ", bool[B, 1, 1, T] pad, float[B, 1, 1, T] m",
        constants=graphs.CONSTANTS + ", float some = {-1e9}",
    )
    assert graphs.code(proto) == "mask_replaces_scores"
