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


STATES = QKV + ", int64 turns"
LOOP = (
    "{result} = Loop (turns, yes, {given}) <body = step (int64 turn, bool go_on, float[{inner}] state)"
    " => (bool again, float[{inner}] next) {\n again = Identity (go_on)\n {lines} }>\n"
)
SCAN = (
    "{result} = Scan ({given}) <num_scan_inputs = 1,"
    " body = step (float[{inner}] state) => (float[{inner}] next) {\n {lines} }>\n"
)


def _loop(form: str, result: str, given: str, inner: str, lines: str) -> str:
    values = {"result": result, "given": given, "inner": inner, "lines": lines}
    for name, value in values.items():
        form = form.replace("{" + name + "}", value)
    return form


BODIES = {
    "the softmax": (
        PRODUCT
        + _loop(LOOP, "probs", "scaled", "B, 4, S, T", "next = Softmax <axis = -1> (state)\n")
        + "out = MatMul (probs, v)\n",
        "the softmax lies in the body of Loop",
    ),
    "the softmax, of what is made of the state": (
        PRODUCT
        + _loop(LOOP, "probs", "scores", "B, 4, S, T", "a = Mul (state, scale)\n next = Softmax <axis = -1> (a)\n")
        + "out = MatMul (probs, v)\n",
        "the softmax lies in the body of Loop",
    ),
    "the softmax, of each batch entry": (
        PRODUCT
        + _loop(SCAN, "probs", "scaled", "4, S, T", "next = Softmax <axis = -1> (state)\n")
        + "out = MatMul (probs, v)\n",
        "the softmax lies in the body of Scan",
    ),
    "the softmax and the product with V": (
        "kt = Transpose <perm = [0, 1, 3, 2]> (v)\n scaled = MatMul (q, kt)\n"
        + _loop(LOOP, "out", "scaled", "B, 4, S, S", "p = Softmax <axis = -1> (state)\n next = MatMul (p, state)\n"),
        "the softmax and the product with V lie in the body of Loop",
    ),
    "the product with V": (
        PRODUCT
        + "p = Softmax <axis = -1> (scaled)\n"
        + _loop(LOOP, "probs", "p", "B, 4, S, T", "n = MatMul (state, v)\n next = MatMul (n, kt)\n")
        + "out = Add (probs, scaled)\n",
        "the product with V lies in the body of Loop",
    ),
    "the product with V, of each batch entry": (
        PRODUCT
        + "p = Softmax <axis = -1> (scaled)\n i = Identity (p)\n"
        + _loop(SCAN, "out", "i", "4, S, T", "next = MatMul (state, state)\n"),
        "the product with V lies in the body of Scan",
    ),
}


@pytest.mark.parametrize("part", BODIES)
def test_a_part_of_the_attention_in_a_loop_that_is_given_the_rest_is_named(part: str) -> None:
    body, text = BODIES[part]
    sites = find(ir.from_proto(model(body, inputs=STATES, outputs="float[b, h, s, d] out")))
    assert [site.status for site in sites] == ["refused"]
    assert sites[0].reason is not None
    assert sites[0].reason.code == "subgraph"
    assert sites[0].reason.text.startswith(text)


OTHER_BODIES = {
    "a state that no product makes": _loop(LOOP, "probs", "q", "B, 4, S, 8", "next = Softmax <axis = -1> (state)\n")
    + "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n out = MatMul (probs, kt)\n",
    "no product that the state enters": PRODUCT
    + "p = Softmax <axis = -1> (scaled)\n"
    + _loop(LOOP, "out", "p", "B, 4, S, T", "a = MatMul (q, kt)\n next = Relu (state)\n"),
    "no product below": PRODUCT + _loop(LOOP, "out", "scaled", "B, 4, S, T", "next = Softmax <axis = -1> (state)\n"),
}


@pytest.mark.parametrize("name", OTHER_BODIES)
def test_a_softmax_in_or_above_a_loop_is_no_attention_without_two_products(name: str) -> None:
    sites = find(ir.from_proto(model(OTHER_BODIES[name], inputs=STATES, outputs="float[b, h, s, d] out")))
    assert [site.status for site in sites] == ["not_attention"]


@pytest.mark.parametrize(
    ("form", "inner", "perm"), [(LOOP, "B, 4, S, 8", "[0, 1, 3, 2]"), (SCAN, "4, S, 8", "[0, 2, 1]")]
)
def test_a_body_whose_inputs_have_no_rank_is_refused_as_one(form: str, inner: str, perm: str) -> None:
    product = PRODUCT.replace("[0, 1, 3, 2]", perm)
    lines = product.replace("(q, kt)", "(state, kt)").replace("(k)", "(state)") + REST.replace("masked", "scaled")
    lines = lines.replace("out =", "next =").replace("(probs, v)", "(probs, state)")
    proto = model(_loop(form, "out", "q", inner, lines), inputs=STATES)
    for attribute in proto.graph.node[0].attribute:
        for value in attribute.g.input:
            if value.name == "state":
                value.type.tensor_type.ClearField("shape")
    (site,) = find(ir.from_proto(proto))
    assert site.reason is not None
    assert site.reason.code == "subgraph"
