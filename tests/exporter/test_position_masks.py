# SPDX-License-Identifier: Apache-2.0
"""A mask of positions becomes causal or a window only when that is proven for every length."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exporter import graphs
from exporter.graphs import SIZES, SQUARE, attention, both, causal, fuse, holding, numbers, only

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
    proto = attention(
        "far = Sub (i, j)\n near = Less (far, w)\n past = LessOrEqual (j, i)\n keep = And (near, past)\n"
        "bias = Where (keep, zero, hidden)\n masked = Add (scaled, bias)",
        constants=graphs.CONSTANTS + ", int64 w = {4096}",
    )
    site = only(fuse(proto)[1])
    assert site.attributes is not None
    assert (site.attributes.causal, site.attributes.window_left) == (1, 4095)


BOTH_FAR = {
    "behind a sum": (
        "ci = Sub (i, a)\n cj = Sub (j, a)\n bi = GreaterOrEqual (ci, b)\n bj = GreaterOrEqual (cj, b)\n"
        "bb = And (bi, bj)\n keep = Or (past, bb)",
        "int64 a = {40}, int64 b = {300}",
        340,
    ),
    "too far to try with heads": (
        "m = Min (i, j)\n near = Less (m, ends)\n keep = And (past, near)",
        "int64[4, 1, 1] ends = {3000, 3000, 3000, 9999}",
        3000,
    ),
}
"""Masks that are causal but where both a query and its key lie far out."""


@pytest.mark.parametrize("name", BOTH_FAR)
def test_a_mask_that_differs_where_queries_and_keys_are_both_far_is_not_taken_for_causal(name: str) -> None:
    lines, constants, end = BOTH_FAR[name]
    proto = attention(
        f"past = LessOrEqual (j, i)\n {lines}\n masked = Where (keep, scaled, hidden)",
        constants=f"{graphs.CONSTANTS}, {constants}",
    )
    fused, sites = fuse(proto)
    assert only(sites).bias_shape is not None
    expected, got = both(proto, fused, numbers({"B": 1, "S": end + 20, "T": end + 30}, depth=8))
    seen = np.isfinite(expected)
    np.testing.assert_allclose(got[seen], expected[seen], atol=3e-6, rtol=0)


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
    holding(proto, buffer=buffer)
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
        None,
    ),
    "factor": (
        "f = Cast <to = 1> (far)\n d = Mul (f, w)\n near = Less (d, one)",
        "float w = {0.005}, float one = {1}",
        199,
    ),
    "attribute": ("w = ConstantOfShape <value = int64[1] {200}> (ax1)\n near = Less (far, w)", "bool no = {0}", 199),
    "square": ("s = Mul (far, far)\n near = Less (s, w)", "int64 w = {90000}", None),
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
    proto = attention(
        "long = Range (i0, w, i1)\n c = ReduceMax <keepdims = 0> (long)\n k0 = LessOrEqual (j, i)\n"
        "k1 = LessOrEqual (c, w)\n keep = And (k0, k1)\n masked = Where (keep, scaled, hidden)",
        constants=graphs.CONSTANTS + ", int64 w = {1000000000000}",
    )
    site = only(fuse(proto)[1])
    assert causal(site) == "top_left"
    assert site.bias_shape is not None


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
    holding(proto, m=triangle)
    fused, sites = fuse(proto)
    assert causal(only(sites)) == "none"
    expected, got = both(proto, fused, numbers({"B": 2, "S": 4, "T": 4}))
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def _behind_a_cache(buffer: np.ndarray) -> onnx.ModelProto:
    """Rows P to P+S and columns to P+S of a buffer, as a model reads it whose keys are P cached ones and S new."""
    lines = (
        "all_k = Concat <axis = 2> (past, k)\n kt = Transpose <perm = [0, 1, 3, 2]> (all_k)\n"
        "scores = MatMul (q, kt)\n scaled = Mul (scores, scale)\n all_v = Concat <axis = 2> (past_v, v)\n"
        "s = Shape <start = 2, end = 3> (q)\n t = Shape <start = 2, end = 3> (all_k)\n p = Sub (t, s)\n"
        "band = Slice (buffer, p, t, ax0)\n keep = Slice (band, ax0, t, ax1)\n masked = Where (keep, scaled, hidden)\n"
        "probs = Softmax <axis = -1> (masked)\n out = MatMul (probs, all_v)\n"
    )
    proto = graphs.model(
        lines,
        inputs="float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v, float[B, 4, P, 8] past, "
        f"float[B, 4, P, 8] past_v, bool[{len(buffer)}, {len(buffer)}] buffer",
    )
    holding(proto, buffer=buffer)
    return proto


_ROW, _COLUMN = np.ogrid[:300, :300]
BUFFERS = {
    "causal": (_COLUMN <= _ROW, "bottom_right", -1),
    "a window": ((_COLUMN <= _ROW) & (_ROW - _COLUMN < 256), "bottom_right", 255),
    "a short window": ((_COLUMN <= _ROW) & (_ROW - _COLUMN < 100), "bottom_right", 99),
    "chunks": ((_COLUMN <= _ROW) & (_ROW // 200 == _COLUMN // 200), "none", -1),
    "one hidden key in the last rows": ((_COLUMN <= _ROW) & ~((_ROW > 200) & (_COLUMN == 3)), "none", -1),
    "one hidden pair": ((_COLUMN <= _ROW) & ~((_ROW == 150) & (_COLUMN == 20)), "none", -1),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_all_of_a_buffer_counts_that_a_cache_shares_with_new_keys(name: str) -> None:
    """No length of S or P alone that is tried for its size, 300, fits: the two share the buffer."""
    buffer, kind, left = BUFFERS[name]
    proto = _behind_a_cache(buffer)
    fused, sites = fuse(proto)
    site = only(sites)
    assert causal(site) == kind
    assert site.attributes is not None
    assert site.attributes.window_left == left
    assert (site.bias_shape or ["P + S"])[-1] == "P + S"
    assert (site.bias_shape is None) == (kind != "none")
    random = np.random.default_rng(8)
    for new, old in ((3, 5), (1, 290), (120, 180), (1, 0), (1, 150)):
        q, k, v = (random.standard_normal((1, 4, new, 8)).astype(np.float32) for _ in range(3))
        past = [random.standard_normal((1, 4, old, 8)).astype(np.float32) for _ in range(2)]
        expected, got = both(proto, fused, [q, k, v, *past])
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("keys", ["T", "S"])
def test_a_hole_in_a_buffer_too_large_to_look_through_is_never_lost(keys: str) -> None:
    buffer = np.tri(8192, dtype=bool)
    buffer[4000, 17] = False
    proto = attention(
        "from = Sub (columns, rows)\n f = Unsqueeze (from, ax0)\n c = Unsqueeze (columns, ax0)\n"
        "band = Slice (buffer, f, c, ax0)\n keep = Slice (band, ax0, c, ax1)\n masked = Where (keep, scaled, hidden)",
        inputs=graphs.QKV + ", bool[8192, 8192] buffer",
    )
    holding(proto, buffer=buffer)
    assert only(fuse(of_one_length(proto) if keys == "S" else proto)[1]).bias_shape is not None
