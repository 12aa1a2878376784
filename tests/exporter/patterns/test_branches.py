# SPDX-License-Identifier: Apache-2.0
"""Attention of which a part lies in a branch or a body is refused as that, whichever part it is."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from exporter.graphs import PRODUCT, QKV, REST, model

from flash_export.find import find

WITH = QKV + ", bool c"
SCALED = (
    "masked = If (c) <then_branch = t () => (float[B, 4, S, T] a) { n = Constant <value_float = 2.0> ()\n"
    " a = Mul (scaled, n) }, else_branch = e () => (float[B, 4, S, T] b) { b = Identity (scaled) }>\n"
)
SOFTMAX = (
    "probs = If (c) <then_branch = t () => (float[B, 4, S, T] a) { a = Softmax <axis = -1> (scaled) },"
    " else_branch = e () => (float[B, 4, S, T] b) { b = Softmax <axis = 2> (scaled) }>\n out = MatMul (probs, v)\n"
)
NESTED = (
    "probs = If (c) <then_branch = t () => (float[B, 4, S, T] a) { a = If (c) <"
    "then_branch = t2 () => (float[B, 4, S, T] a2) { a2 = Softmax <axis = -1> (scaled) },"
    " else_branch = e2 () => (float[B, 4, S, T] b2) { b2 = Identity (scaled) }> },"
    " else_branch = e () => (float[B, 4, S, T] b) { b = Identity (scaled) }>\n out = MatMul (probs, v)\n"
)
SECOND = (
    "probs = Softmax <axis = -1> (scaled)\n out = If (c) <"
    "then_branch = t () => (float[B, 4, S, 8] a) { a = MatMul (probs, v) },"
    " else_branch = e () => (float[B, 4, S, 8] b) { {other} }>\n"
)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (PRODUCT + SCALED + REST, "the scores are made in a branch of If"),
        (PRODUCT + SOFTMAX, "the softmax lies in a branch of If"),
        (PRODUCT + NESTED, "the softmax lies in a branch of If"),
        (PRODUCT + SECOND.replace("{other}", "b = Identity (q)"), "the product with V lies in a branch of If"),
        (PRODUCT + SECOND.replace("{other}", "b = MatMul (probs, k)"), "the product with V lies in a branch of If"),
    ],
)
def test_a_part_of_the_attention_in_a_branch_is_named(body: str, text: str) -> None:
    sites = find(ir.from_proto(model(body, inputs=WITH)))
    assert sites
    for site in sites:
        assert site.reason is not None, site.status
        assert site.reason.code == "subgraph"
        assert site.reason.text.startswith(text)


@pytest.mark.parametrize("inside", [True, False])
def test_a_softmax_in_or_below_a_branch_is_no_attention_without_two_products(inside: bool) -> None:
    chosen = (
        "scaled = If (c) <then_branch = t () => (float[B, 4, S, 8] a) { a = Relu (q) },"
        " else_branch = e () => (float[B, 4, S, 8] b) { b = Identity (q) }>\n"
    )
    body = SOFTMAX.replace("scaled", "q").replace("MatMul (probs, v)", "Relu (probs)").replace("S, T", "S, 8")
    if not inside:
        body = chosen + "probs = Softmax <axis = -1> (scaled)\n out = Mul (probs, q)\n"
    sites = find(ir.from_proto(model(body, inputs=WITH)))
    assert {s.status for s in sites} == {"not_attention"}
