# SPDX-License-Identifier: Apache-2.0
"""Attention written out is fused, or refused for the node that stands in the way."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import (
    code,
    fuse,
    model,
    only,
)

REFUSED = {
    "unknown_operator": graphs.PRODUCT + "masked = Relu (scaled)\n" + graphs.REST,
    "scale_not_scalar": graphs.PRODUCT + "b = Add (scaled, t)\n masked = Mul (b, t)\n" + graphs.REST,
    "sink": graphs.PRODUCT
    + "all = Concat <axis = -1> (scaled, t)\n p = Softmax <axis = -1> (all)\n"
    + "probs = Slice (p, ax0, m1, ax3)\n out = MatMul (probs, v)\n",
    "probabilities_changed": graphs.PRODUCT + "p = Softmax (scaled)\n probs = Mul (p, t)\n out = MatMul (probs, v)\n",
    "softmax_axis": graphs.PRODUCT + "probs = Softmax <axis = 2> (scaled)\n out = MatMul (probs, v)\n",
    "softcap_form": graphs.PRODUCT + "b = Add (scaled, t)\n masked = Tanh (b)\n" + graphs.REST,
    "mask_replaces_scores": graphs.PRODUCT
    + "keep = Greater (t, zero)\n masked = Where (keep, scaled, t)\n"
    + graphs.REST,
    "dropout_active": graphs.PRODUCT
    + "p = Softmax (scaled)\n probs = Dropout (p, scale, yes)\n out = MatMul (probs, v)\n",
}


@pytest.mark.parametrize("expected", REFUSED)
def test_each_obstacle_has_its_own_reason_and_changes_nothing(expected: str) -> None:
    proto = model(
        REFUSED[expected],
        inputs=graphs.QKV + ", float[B, 4, S, 1] t",
        constants=graphs.CONSTANTS + ", int64[1] m1 = {-1}",
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.code == expected
    assert site.reason.node
    assert site.reason.action
    assert fused.graph.node == ir.to_proto(ir.from_proto(proto)).graph.node


def test_softmax_of_opset_11_over_several_axes_is_refused_and_over_the_last_is_fused() -> None:
    body = graphs.PRODUCT + "probs = Softmax <axis = {}> (scaled)\n out = MatMul (probs, v)\n"
    for axis, expected in ((1, "softmax_flattens"), (-2, "softmax_flattens"), (3, "fused"), (-1, "fused")):
        assert code(model(body.replace("{}", str(axis)), opset=11)) == expected
    default = graphs.PRODUCT + "probs = Softmax (scaled)\n out = MatMul (probs, v)\n"
    assert code(model(default, opset=11)) == "softmax_flattens"
    assert code(model(default, opset=13)) == "fused"


def test_quantized_products_are_refused_as_such() -> None:
    body = (
        graphs.PRODUCT + "low = QuantizeLinear (scaled, scale)\n masked = DequantizeLinear (low, scale)\n" + graphs.REST
    )
    assert code(model(body)) == "quantized"


@pytest.mark.parametrize(
    ("lines", "cap", "scale"),
    [
        ("a = Div (scaled, five)\n b = Tanh (a)\n masked = Mul (b, five)\n", 5.0, 0.5),
        ("b = Tanh (scaled)\n masked = Mul (b, five)\n", 5.0, 2.5),
        ("masked = Tanh (scaled)\n", 1.0, 0.5),
    ],
)
def test_a_soft_cap_is_read_with_the_scale_that_lies_inside_it(lines: str, cap: float, scale: float) -> None:
    proto = model(graphs.PRODUCT + lines + graphs.REST, constants=graphs.CONSTANTS + ", float five = {5.0}")
    fused, sites = fuse(proto)
    assert only(sites).attributes is not None
    assert (only(sites).attributes.softcap, only(sites).attributes.scale) == (cap, pytest.approx(scale))
    expected, got = graphs.both(proto, fused, [3 * x for x in graphs.numbers({"B": 2, "S": 5, "T": 7})])
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


SCORES = (
    "q5 = Unsqueeze (q, ax3)\n k5 = Unsqueeze (k, ax2)\n qk = Mul (q5, k5)\n"
    "scores = ReduceSum <keepdims = 0> (qk, ax4)\n scaled = Mul (scores, scale)\n"
)
VALUES = (
    "p5 = Unsqueeze (probs, ax4)\n v5 = Unsqueeze (v, ax2)\n pv = Mul (p5, v5)\n"
    "out = ReduceSum <keepdims = 0> (pv, ax3)\n"
)


@pytest.mark.parametrize("which", ["scores", "values", "both"])
def test_products_written_out_are_refused_by_name(which: str) -> None:
    first = SCORES if which != "values" else graphs.PRODUCT
    second = VALUES if which != "scores" else "out = MatMul (probs, v)\n"
    constants = graphs.CONSTANTS + ", int64[1] ax4 = {4}"
    _, sites = graphs.fuse(model(f"{first}probs = Softmax <axis = -1> (scaled)\n{second}", constants=constants))
    (site,) = sites
    assert site.reason is not None
    assert (site.reason.code, "ReduceSum" in site.reason.text) == ("product_form", True)


def test_a_weighted_mean_of_norms_or_by_a_layer_is_no_attention() -> None:
    constants = graphs.CONSTANTS + ", int64[1] ax4 = {4}"
    squares = "qq = Mul (q, q)\n norms = ReduceSum <keepdims = 0> (qq, ax3)\n probs = Softmax <axis = -1> (norms)\n"
    pooled = squares + "p4 = Unsqueeze (probs, ax3)\n pv = Mul (p4, q)\n out = ReduceSum <keepdims = 0> (pv, ax2)\n"
    assert code(model(pooled, inputs="float[B, 4, S, 8] q", outputs="float[B, 4, 8] out", constants=constants)) == (
        "not_attention"
    )
