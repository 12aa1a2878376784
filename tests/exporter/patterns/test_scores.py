# SPDX-License-Identifier: Apache-2.0
"""Sinks, factors of the rows and shifts by the maximum are read as what they are, or refused."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from contract.reference import attention as reference
from contract.tolerance import unfused, why_rejected
from exporter import graphs
from exporter.graphs import both, code, fuse, model, numbers, only

from flash_export.find import find

SIZES = [{"B": 2, "S": 5, "T": 7}, {"B": 1, "S": 1, "T": 3}, {"B": 3, "S": 9, "T": 4}]
CONSTANTS = graphs.CONSTANTS + (
    ", int64[1] m1 = {-1}, int64[1] m2 = {-2}, int64[4] per_head = {1, 4, 1, 1}, int64[1] one = {1}, float half = {0.5}"
)
COLUMN = (
    "head = Reshape (sinks, per_head)\n b = Shape <start = 0, end = 3> (scores)\n shape = Concat <axis = 0> (b, one)\n"
    "beside = Expand (head, shape)\n"
)
JOINED = "all = Concat <axis = -1> (scaled, beside)\n"
DROPPED = "probs = Slice (p, ax0, m1, m1)\n out = MatMul (probs, v)\n"
SINKS = graphs.QKV + ", float[4] sinks"
VALUES = np.array([0.0, 1.0, -2.0, 3.0], np.float32)
LEVELLED = "top = ReduceMax <keepdims = 1> (all, m1)\n low = Sub (all, top)\n p = Softmax <axis = -1> (low)\n"


@pytest.mark.parametrize("softmax", ["p = Softmax <axis = -1> (all)\n", LEVELLED])
def test_a_column_beside_the_scores_becomes_the_sinks(softmax: str) -> None:
    proto = model(graphs.PRODUCT + COLUMN + JOINED + softmax + DROPPED, inputs=SINKS, constants=CONSTANTS)
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert (site.attributes.has_sinks, site.attributes.has_bias) == (1, 0)
    assert [n.op_type for n in fused.graph.node if n.domain == ""] == []
    for sizes in SIZES:
        q, k, v = numbers(sizes)
        expected, got = both(proto, fused, [q, k, v, VALUES])
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)
        right = reference(q, k, v, scale=0.5, sinks=VALUES)[0]
        assert why_rejected(got, right, unfused(q, k, v, scale=0.5, sinks=VALUES)) == []


def test_sinks_stand_beside_a_causal_mask_and_padding() -> None:
    lines = "keep = LessOrEqual (j, i)\n c = Where (keep, zero, hidden)\n a = Add (scaled, c)\n masked = Add (a, m)\n"
    proto = model(
        graphs.LENGTHS
        + graphs.PRODUCT
        + COLUMN
        + lines
        + JOINED.replace("scaled", "masked")
        + "p = Softmax <axis = -1> (all)\n"
        + DROPPED,
        inputs=SINKS + ", float[B, 1, 1, T] m",
        constants=CONSTANTS,
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.attributes is not None
    assert (site.attributes.has_sinks, site.attributes.causal, site.attributes.has_bias) == (1, 1, 1)
    mask = np.zeros((2, 1, 1, 7), np.float32)
    mask[1, ..., 3:] = -np.inf
    expected, got = both(proto, fused, [*numbers(SIZES[0]), VALUES, mask])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


SINK_FAULTS = {
    "kept": JOINED
    + "probs = Softmax <axis = -1> (all)\n wide = Concat <axis = 2> (v, v1)\n out = MatMul (probs, wide)\n",
    "two_dropped": JOINED
    + "p = Softmax <axis = -1> (all)\n probs = Slice (p, ax0, m2, m1)\n out = MatMul (probs, vs)\n",
    "first_dropped": JOINED + "p = Softmax <axis = -1> (all)\n e = Shape <start = 3, end = 4> (all)\n "
    "probs = Slice (p, one, e, m1)\n out = MatMul (probs, v)\n",
    "scaled_after": JOINED + "less = Mul (all, half)\n p = Softmax <axis = -1> (less)\n" + DROPPED,
    "column_first": "all = Concat <axis = -1> (beside, scaled)\n p = Softmax <axis = -1> (all)\n" + DROPPED,
    "dropped_without_a_sink": "p = Softmax <axis = -1> (scaled)\n probs = Slice (p, ax0, m1, m1)\n "
    "out = MatMul (probs, vs)\n",
}


@pytest.mark.parametrize("name", SINK_FAULTS)
def test_a_column_that_is_not_quite_a_sink_is_refused(name: str) -> None:
    proto = model(
        graphs.PRODUCT + COLUMN + SINK_FAULTS[name],
        inputs=SINKS + ", float[B, 4, 1, 8] v1, float[B, 4, U, 8] vs",
        constants=CONSTANTS,
    )
    assert code(proto) in ("sink", "unknown_operator")


def test_a_column_that_differs_from_row_to_row_is_no_sink() -> None:
    body = graphs.PRODUCT + JOINED + "p = Softmax <axis = -1> (all)\n" + DROPPED
    assert code(model(body, inputs=graphs.QKV + ", float[B, 4, S, 1] beside", constants=CONSTANTS)) == "sink"


@pytest.mark.parametrize(("shape", "sizes"), [("[4, 1, 1]", (4, 1, 1)), ("[B, 1, S, 1]", (2, 1, 5, 1))])
def test_a_factor_of_each_row_multiplies_q(shape: str, sizes: tuple[int, ...]) -> None:
    body = graphs.PRODUCT + "masked = Mul (scaled, f)\n" + graphs.REST
    proto = model(body, inputs=graphs.QKV + f", float{shape} f")
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    assert [n.op_type for n in fused.graph.node] == ["Mul", "FlashAttention"]
    factor = np.random.default_rng(5).standard_normal(sizes).astype(np.float32)
    expected, got = both(proto, fused, [*numbers(SIZES[0]), factor])
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lines", "inputs"),
    [
        ("masked = Mul (scaled, f)\n", "float[T] f"),
        ("b = Add (scaled, f)\n masked = Mul (b, f)\n", "float[4, 1, 1] f"),
        ("b = Tanh (scaled)\n c = Mul (b, f)\n masked = Mul (c, half)\n", "float[4, 1, 1] f"),
        ("masked = Div (scaled, f)\n", "float[4, 1, 1] f"),
    ],
)
def test_a_factor_that_cannot_be_moved_to_q_is_refused_and_leaves_no_node(lines: str, inputs: str) -> None:
    proto = model(graphs.PRODUCT + lines + graphs.REST, inputs=graphs.QKV + ", " + inputs, constants=CONSTANTS)
    assert code(proto) == "scale_not_scalar"
    assert [n.op_type for n in fuse(proto)[0].graph.node] == [n.op_type for n in proto.graph.node]


def test_the_maximum_over_another_axis_is_no_shift() -> None:
    """K stands at the left, so that the softmax runs over the rows and a maximum over the columns matters."""
    lines = (
        "qt = Transpose <perm = [0, 1, 3, 2]> (q)\n scores = MatMul (k, qt)\n"
        "top = ReduceMax <keepdims = 1> (scores, {})\n low = Sub (scores, top)\n p = Softmax <axis = 2> (low)\n"
        "pt = Transpose <perm = [0, 1, 3, 2]> (p)\n out = MatMul (pt, v)\n"
    )
    assert code(model(lines.replace("{}", "m1"), constants=CONSTANTS)) == "softmax_axis"


SHIFTED = "top = ReduceMax <keepdims = 1> (scaled, m1)\n low = Sub (scaled, top)\n"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (JOINED.replace("scaled", "low") + "p = Softmax <axis = -1> (all)\n" + DROPPED, "sink"),
        (
            JOINED.replace("scaled", "less") + "p = Softmax <axis = -1> (all)\n" + DROPPED,
            "sink",
        ),
        ("c = Tanh (low)\n masked = Mul (c, half)\n" + graphs.REST, "softcap_form"),
        ("c = Tanh (less)\n masked = Mul (c, half)\n" + graphs.REST, "softcap_form"),
    ],
)
def test_a_maximum_is_no_part_of_what_a_sink_or_a_cap_sees(lines: str, reason: str) -> None:
    """Both differ for scores that are lower by a number of each row; only a softmax does not."""
    body = graphs.PRODUCT + COLUMN + SHIFTED + "less = Mul (low, half)\n" + lines
    assert code(model(body, inputs=SINKS, constants=CONSTANTS)) == reason


@pytest.mark.parametrize(
    "lines", ["c = Tanh (scaled)\n scaled_ = Mul (c, half)\n" + SHIFTED.replace("scaled", "scaled_"), SHIFTED]
)
def test_a_maximum_subtracted_right_before_the_softmax_changes_nothing(lines: str) -> None:
    proto = model(graphs.PRODUCT + lines + "masked = Identity (low)\n" + graphs.REST, constants=CONSTANTS)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    expected, got = both(proto, fused, numbers(SIZES[0]))
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("lines", "scale"), [("masked = Neg (scaled)", -0.5), ("masked = Add (scaled, scaled)", 1.0)])
def test_scores_that_are_negated_or_doubled_have_another_scale(lines: str, scale: float) -> None:
    proto = model(graphs.PRODUCT + lines + "\n" + graphs.REST)
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert site.attributes.scale == scale
    for sizes in SIZES:
        inputs = numbers(sizes)
        expected, got = both(proto, fused, inputs)
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("t1 = Tanh (scaled)\n a = Mul (t1, half)\n t2 = Tanh (a)\n masked = Mul (t2, half)", "another soft cap lies"),
        ("w = Abs (sinks)\n h = Reshape (w, per_head)\n masked = Div (scaled, h)", "are divided by a tensor"),
        ("m = ReduceMean (scaled, m1)\n masked = Sub (scaled, m)", "are also read by another node"),
    ],
)
def test_a_refusal_says_what_is_so(lines: str, why: str) -> None:
    proto = model(graphs.PRODUCT + lines + "\n" + graphs.REST, inputs=SINKS, constants=CONSTANTS)
    site = only(fuse(proto)[1])
    assert site.reason is not None
    assert why in site.reason.text


BENT = {
    "Relu": ("bent = Relu (scaled)\n", "unknown_operator"),
    "Clip": ("bent = Clip (scaled, zero, half)\n", "unknown_operator"),
    "DequantizeLinear": ("i = QuantizeLinear (scaled, half)\n bent = DequantizeLinear (i, half)\n", "quantized"),
}


@pytest.mark.parametrize(
    "last",
    [
        "fill = Constant <value_float = -1000000000.0> ()\n masked = Where (keep, fill, bent)\n",
        "fill = Constant <value_float = -3e38> ()\n masked = Max (fill, bent)\n",
        "f = Exp (m)\n masked = Mul (f, bent)\n",
        "f = Unsqueeze (m, ax0)\n masked = Add (f, bent)\n",
    ],
)
@pytest.mark.parametrize("operator", BENT)
def test_the_operator_that_is_named_is_the_scores_own(operator: str, last: str) -> None:
    """What stands beside the scores, a fill or a factor, comes first in some graphs and is no reason."""
    lines, expected = BENT[operator]
    inputs = graphs.QKV + ", bool[B, 1, 1, T] keep, float[1] m"
    proto = model(graphs.PRODUCT + lines + last + graphs.REST, inputs=inputs, constants=CONSTANTS)
    reason = only(find(ir.from_proto(proto))).reason
    assert reason is not None
    assert (reason.code, reason.text.split()[0]) == (expected, operator)


BESIDE = {
    "the divisor": ("sq = Mul (scaled, scaled)\n more = Add (sq, half)\n masked = Div (half, more)\n", "Div"),
    "the divisor of a weight": ("more = Add (scaled, half)\n masked = Div (row, more)\n", "Div"),
    "the condition": ("high = Greater (scaled, zero)\n masked = Where (high, half, zero)\n", "Where"),
}


@pytest.mark.parametrize("where", BESIDE)
def test_scores_of_which_an_operator_makes_something_else_are_refused(where: str) -> None:
    lines, operator = BESIDE[where]
    inputs = graphs.QKV + ", float[B, 4, S, T] row"
    proto = model(graphs.PRODUCT + lines + graphs.REST, inputs=inputs, constants=CONSTANTS)
    reason = only(find(ir.from_proto(proto))).reason
    assert reason is not None
    assert (reason.code, reason.text.split()[0]) == ("unknown_operator", operator)


@pytest.mark.parametrize(
    "lines",
    ["masked = Div (row, other)\n", "c = Greater (other, zero)\n masked = Where (c, row, hidden)\n"],
)
def test_a_divisor_or_condition_that_no_product_makes_is_no_reason(lines: str) -> None:
    inputs = graphs.QKV + ", float[B, 4, S, T] row, float[B, 4, S, T] other"
    proto = model(lines + graphs.REST, inputs=inputs, constants=CONSTANTS)
    assert only(find(ir.from_proto(proto))).status == "not_attention"
