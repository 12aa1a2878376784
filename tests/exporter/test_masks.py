# SPDX-License-Identifier: Apache-2.0
"""A mask becomes an attribute only when that is proven, and hides in every row exactly what it hid before."""

from __future__ import annotations

import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from contract.reference import attention as reference
from contract.tolerance import unfused, why_rejected
from exporter import graphs
from exporter.graphs import attention, both, fuse, numbers, only

from flash_export.mask_terms import Literal as Part
from flash_export.mask_terms import conjuncts

SIZES = [{"B": 2, "S": 5, "T": 7}, {"B": 1, "S": 1, "T": 3}, {"B": 3, "S": 9, "T": 4}, {"B": 1, "S": 67, "T": 130}]
SQUARE = [{"B": 2, "S": 5, "T": 5}, {"B": 1, "S": 1, "T": 1}, {"B": 1, "S": 67, "T": 67}]


def causal(site) -> str:  # type: ignore[no-untyped-def]
    assert site.status == "fused", site.reason
    return site.attributes.causal_kind


BANDS = {
    "top_left": ("keep = LessOrEqual (j, i)", "top_left", -1, -1),
    "top_left_not": ("late = Greater (j, i)\n keep = Not (late)", "top_left", -1, -1),
    "bottom_right": ("d = Sub (columns, rows)\n e = Add (i, d)\n keep = LessOrEqual (j, e)", "bottom_right", -1, -1),
    "all": ("keep = GreaterOrEqual (j, i0)", "none", -1, -1),
    "window": (
        "far = Sub (i, j)\n near = Less (far, w)\n past = LessOrEqual (j, i)\n keep = And (near, past)",
        "top_left",
        39,
        -1,
    ),
    "two_sided": (
        "far = Sub (i, j)\n way = Abs (far)\n keep = Less (way, w)",
        "none",
        39,
        39,
    ),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_of_any_spelling_becomes_attributes_at_every_length(name: str) -> None:
    lines, kind, left, right = BANDS[name]
    proto = attention(
        f"{lines}\n bias = Where (keep, zero, hidden)\n masked = Add (scaled, bias)",
        constants=graphs.CONSTANTS + ", int64 w = {40}",
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert causal(site) == kind
    assert site.bias_shape is None
    assert (site.attributes.window_left, site.attributes.window_right) == (left, right)
    for sizes in SIZES[:2] + SIZES[3:]:
        expected, got = both(proto, fused, numbers(sizes))
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("keep = Less (j, i)", "strictly below the diagonal leaves row 0 empty and is no causal mask"),
        ("e = Add (i, two)\n keep = LessOrEqual (j, e)", "a diagonal shifted by two"),
        ("m = Mod (j, two)\n keep = Equal (m, i0)", "every second key"),
        ("e = Min (i, two)\n keep = LessOrEqual (j, e)", "causal in the first rows alone"),
    ],
)
def test_what_is_not_quite_causal_does_not_become_causal(lines: str, why: str) -> None:
    proto = attention(
        f"{lines}\n bias = Where (keep, zero, hidden)\n masked = Add (scaled, bias)",
        constants=graphs.CONSTANTS + ", int64 two = {2}",
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused"
    assert site.attributes.causal == 0 or site.bias_shape is not None, why
    for sizes in SIZES[:2] + SIZES[3:]:
        expected, got = both(proto, fused, numbers(sizes))
        seen = np.isfinite(expected)  # keyless rows: NaN unfused, 0 fused
        np.testing.assert_allclose(got[seen], expected[seen], atol=3e-6, rtol=0)
        assert (got[~seen] == 0).all()


def test_a_window_wider_than_any_usual_trial_is_not_taken_for_causal() -> None:
    """Sliding windows of 4,096 tokens look causal at every length a quick test would try."""
    start = time.monotonic()
    proto = attention(
        "far = Sub (i, j)\n near = Less (far, w)\n past = LessOrEqual (j, i)\n keep = And (near, past)\n"
        "bias = Where (keep, zero, hidden)\n masked = Add (scaled, bias)",
        constants=graphs.CONSTANTS + ", int64 w = {4096}",
    )
    site = only(fuse(proto)[1])
    assert site.attributes is not None
    assert (site.attributes.causal, site.attributes.window_left) == (1, 4095)
    assert time.monotonic() - start < 60


NEVER_MET = {
    "numbers that cancel": (
        "x = Add (far, big)\n near = Less (x, limit)",
        "int64 big = {2000000000}, int64 limit = {2000003000}",
    ),
    "tiny factor": (
        "f = Cast <to = 1> (far)\n x = Mul (f, big)\n near = Less (x, limit)",
        "float big = {1e-10}, float limit = {3e-7}",
    ),
    "huge divisor": (
        "f = Cast <to = 1> (far)\n x = Div (f, big)\n near = Less (x, limit)",
        "float big = {1e10}, float limit = {3e-7}",
    ),
    "large table": (
        "c = Clip (far, i0, last)\n limits = Gather (table, c)\n near = Less (far, limits)",
        f"int64 last = {{99}}, int64[100] table = {{{', '.join(['3000'] * 100)}}}",
    ),
    "positions that wrap around": ("f = Cast <to = 5> (far)\n near = GreaterOrEqual (f, low)", "int16 low = {-32000}"),
    "a filled position": (
        "x = Where (past, far, big)\n y = Sub (x, big)\n near = Less (y, limit)",
        "int64 big = {-2000000000}, int64 limit = {2000003000}",
    ),
}
"""A window of 3,000 keys, or one that appears where int16 ends, in numbers that a short mask never shows."""


def of_one_length(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same with S for T: a mask of S x S is not tried far out, where it would fill the memory."""
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "T":
                dim.dim_param = "S"
    return proto


@pytest.mark.parametrize("name", NEVER_MET)
def test_a_window_that_its_numbers_do_not_show_is_never_taken_for_causal(name: str) -> None:
    lines, constants = NEVER_MET[name]
    wide = attention(
        f"past = LessOrEqual (j, i)\n far = Sub (i, j)\n {lines}\n keep = And (near, past)\n"
        "bias = Where (keep, zero, hidden)\n masked = Add (scaled, bias)",
        constants=f"{graphs.CONSTANTS}, {constants}",
    )
    proto = of_one_length(wide)
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused"
    assert site.bias_shape is not None or site.attributes.window_left == 2999
    expected, got = both(proto, fused, numbers(SQUARE[0]))
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_mask_of_numbers_out_of_reach_that_meet_no_position_is_still_proven() -> None:
    """As Hugging Face writes it: a fill of finfo.min times a truth, and a clip of positions at the largest int64."""
    proto = attention(
        "top = Clip (j, i0, most)\n late = Greater (top, i)\n f = Cast <to = 1> (late)\n bias = Mul (f, fill)\n"
        "masked = Add (scaled, bias)",
        constants=f"{graphs.CONSTANTS}, int64 most = {{9223372036854775807}}, float fill = {{-3.4e38}}",
    )
    site = only(fuse(proto)[1])
    assert (causal(site), site.bias_shape) == ("top_left", None)


def test_a_window_beyond_what_is_evaluated_stays_a_tensor() -> None:
    proto = attention(
        "far = Sub (i, j)\n near = Less (far, w)\n past = LessOrEqual (j, i)\n keep = And (near, past)\n"
        "bias = Where (keep, zero, hidden)\n masked = Add (scaled, bias)",
        constants=graphs.CONSTANTS + ", int64 w = {1000000}",
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.attributes is not None
    assert site.attributes.window_left == -1
    assert site.bias_shape is not None
    expected, got = both(proto, fused, numbers(SIZES[0]))
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("offset", [0, 3])
def test_a_causal_buffer_cut_to_the_lengths_is_causal_up_to_its_size(offset: int) -> None:
    """GPT-2's form: a constant lower triangle, of which rows T-S to T and columns to T are taken."""
    buffer = np.tri(96, dtype=bool)
    if offset:
        buffer[40:, :offset] = False  # a local window hidden in the buffer's later rows
    proto = attention(
        "from = Sub (columns, rows)\n f = Unsqueeze (from, ax0)\n c = Unsqueeze (columns, ax0)\n"
        "band = Slice (buffer, f, c, ax0)\n keep = Slice (band, ax0, c, ax1)\n masked = Where (keep, scaled, hidden)",
        inputs=graphs.QKV + ", bool[96, 96] buffer",
    )
    proto.graph.input.remove(proto.graph.input[3])
    proto.graph.initializer.append(onnx.numpy_helper.from_array(buffer, "buffer"))
    site = only(fuse(proto)[1])
    assert site.attributes is not None
    assert (causal(site) == "bottom_right") == (offset == 0)
    assert (site.bias_shape is None) == (offset == 0)


def test_a_finite_fill_of_the_causal_mask_is_causal_only_where_no_row_is_wholly_masked() -> None:
    lines = "bias = Where (keep, zero, lowest)\n masked = Add (scaled, bias)"
    top_left = only(fuse(attention("keep = LessOrEqual (j, i)\n" + lines))[1])
    assert causal(top_left) == "top_left"
    assert top_left.bias_shape is None
    proto = attention("d = Sub (columns, rows)\n e = Add (i, d)\n keep = LessOrEqual (j, e)\n" + lines)
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "none"
    assert only(sites).bias_shape is not None
    for sizes in SIZES:  # S > T among them: the first rows see no key and give the mean of V
        expected, got = both(proto, fused, numbers(sizes))
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


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


@pytest.mark.parametrize("fill", [-1.0, -15.0, -100.0, -1e4])
def test_an_added_causal_fill_that_a_score_can_outweigh_stays_that_number(fill: float) -> None:
    proto = attention(
        "keep = LessOrEqual (j, i)\n bias = Where (keep, zero, some)\n masked = Add (scaled, bias)",
        constants=graphs.CONSTANTS + f", float some = {{{fill}}}",
    )
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "none"
    assert only(sites).bias_shape == [1, 1, "S", "T"]
    for sizes in SIZES:
        q, k, v = numbers(sizes)
        expected, got = both(proto, fused, [q * 10, k * 10, v])
        np.testing.assert_allclose(got, expected, atol=1e-4 if fill > -1000 else 2e-3, rtol=0)


WINDOWS = {
    "product": ("w = Mul (ten, twenty)\n near = Less (far, w)", "int64 ten = {10}, int64 twenty = {20}", 199),
    "power": ("w = Pow (i2, eight)\n near = Less (far, w)", "int64 eight = {8}", 255),
    "sum": ("a = Sub (far, many)\n b = Sub (a, many)\n near = Less (b, i0)", "int64 many = {1000}", 1999),
    "fraction": ("f = Cast <to = 1> (far)\n near = Less (f, w)", "float w = {200.5}", 200),
    "quotient": (
        "f = Cast <to = 1> (far)\n d = Div (f, w)\n near = Less (d, one)",
        "float w = {200.5}, float one = {1}",
        200,
    ),
    "factor": (
        "f = Cast <to = 1> (far)\n d = Mul (f, w)\n near = Less (d, one)",
        "float w = {0.005}, float one = {1}",
        199,
    ),
    "attribute": ("w = ConstantOfShape <value = int64[1] {200}> (ax1)\n near = Less (far, w)", "bool no = {0}", 199),
    "square": ("s = Mul (far, far)\n near = Less (s, w)", "int64 w = {90000}", 299),
    "logarithm": (
        "m = Max (far, i1)\n f = Cast <to = 1> (m)\n l = Log (f)\n near = Less (l, w)",
        "float w = {5.3}",
        None,
    ),
    "far product": ("w = Mul (many, many)\n near = Less (far, w)", "int64 many = {1000}", None),
    "far factors": (
        "f = Cast <to = 1> (far)\n d = Mul (f, w)\n e = Mul (d, w)\n near = Less (e, one)",
        "float w = {0.001}, float one = {1}",
        None,
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_whose_width_is_computed_is_that_window_or_stays_a_tensor(name: str) -> None:
    lines, constants, left = WINDOWS[name]
    proto = attention(
        f"far = Sub (i, j)\n {lines}\n past = LessOrEqual (j, i)\n keep = And (near, past)\n"
        "bias = Where (keep, zero, hidden)\n masked = Add (scaled, bias)",
        constants=f"{graphs.CONSTANTS}, {constants}",
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused"
    assert site.attributes is not None
    assert causal(site) == "top_left"
    assert site.attributes.window_left == (-1 if left is None else left)
    assert (site.bias_shape is None) == (left is not None)
    q, k, v = numbers({"B": 1, "S": 320, "T": 320}, depth=8)
    expected, got = both(proto, fused, [q, k, v])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_mask_that_would_fill_the_memory_stays_in_the_graph() -> None:
    start = time.monotonic()
    proto = attention(
        "long = Range (i0, w, i1)\n c = ReduceMax <keepdims = 0> (long)\n k0 = LessOrEqual (j, i)\n"
        "k1 = LessOrEqual (c, w)\n keep = And (k0, k1)\n masked = Where (keep, scaled, hidden)",
        constants=graphs.CONSTANTS + ", int64 w = {1000000000000}",
    )
    site = only(fuse(proto)[1])
    assert causal(site) == "top_left"
    assert site.bias_shape is not None
    assert time.monotonic() - start < 20


KEYS_FIRST = (
    "qt = Transpose <perm = [0, 1, 3, 2]> (q)\n scores = MatMul (k, qt)\n scaled = Mul (scores, scale)\n"
    "i_ = Transpose <perm = [1, 0]> (i)\n j_ = Transpose <perm = [1, 0]> (j)\n keep = {keep}\n"
    "masked = Where (keep, scaled, hidden)\n probs_ = Softmax <axis = -2> (masked)\n"
    "probs = Transpose <perm = [0, 1, 3, 2]> (probs_)\n out = MatMul (probs, v)\n"
)


@pytest.mark.parametrize("keep", ["LessOrEqual (j_, i_)", "LessOrEqual (i_, j_)"])
def test_a_mask_on_scores_that_stand_keys_first_is_not_read_queries_first(keep: str) -> None:
    proto = graphs.model(graphs.LENGTHS + KEYS_FIRST.format(keep=keep))
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    for sizes in SQUARE:
        expected, got = both(proto, fused, numbers(sizes))
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_triangle_over_heads_and_keys_is_not_causal() -> None:
    triangle = np.where(np.tri(4, dtype=bool), 0, -np.inf).astype(np.float32)
    proto = graphs.model(
        "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n scores = MatMul (q, kt)\n turned = Transpose <perm = [0, 2, 1, 3]>"
        " (scores)\n scaled = Mul (turned, scale)\n masked = Add (scaled, m)\n p = Softmax <axis = -1> (masked)\n"
        "probs = Transpose <perm = [0, 2, 1, 3]> (p)\n out = MatMul (probs, v)\n",
        inputs="float[B, 4, 4, 8] q, float[B, 4, 4, 8] k, float[B, 4, 4, 8] v, float[4, 4] m",
        outputs="float[B, 4, 4, 8] out",
    )
    proto.graph.input.remove(proto.graph.input[3])
    proto.graph.initializer.append(onnx.numpy_helper.from_array(triangle, "m"))
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "none"
    expected, got = both(proto, fused, numbers({"B": 2, "S": 4, "T": 4}))
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


def test_a_mask_that_reads_itself_twice_at_every_node_is_read_in_time() -> None:
    start = time.monotonic()
    lines = "".join(f"n{i + 1} = And (n{i}, n{i})\n" for i in range(40))
    proto = attention(f"{lines} masked = Where (n40, scaled, hidden)", inputs=graphs.QKV + ", bool[B, 1, 1, T] n0")
    assert only(fuse(proto)[1]).bias_shape == ["B", 1, 1, "T"]
    lines = "".join(f"c{i + 1} = Add (c{i}, c{i})\n" for i in range(40))
    proto = attention(
        f"keep = LessOrEqual (j, i)\n c0 = Where (keep, zero, hidden)\n {lines} masked = Add (scaled, c40)"
    )
    assert causal(only(fuse(proto)[1])) == "top_left"
    assert time.monotonic() - start < 20


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
        pad = np.zeros((sizes["B"], 1, 1, sizes["T"]), bool)
        pad[0, ..., : sizes["T"] // 2 + 1] = True
        pad[-1] = True
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
