# SPDX-License-Identifier: Apache-2.0
"""Probabilities that are divided by their sum once more are told apart from a product that is written out."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from exporter import graphs

from flash_export.find import find

INPUTS = graphs.QKV + ", float[B, 1, 1, T] keep"
CONSTANTS = graphs.CONSTANTS + ", int64[1] last = {-1}, float tiny = {0.000001}"
SOFTMAX = graphs.PRODUCT + "p = Softmax <axis = -1> (scaled)\n"
MASKED = "m = Mul (p, keep)\n"
FORMS = {
    "masked, with something added": MASKED + "s = ReduceSum (m, last)\n t = Add (s, tiny)\n n = Div (m, t)\n",
    "masked": MASKED + "s = ReduceSum (m, last)\n n = Div (m, s)\n",
    "masked, with a lower bound and an expand": MASKED
    + "s = ReduceL1 (m, last)\n t = Clip (s, tiny)\n size = Shape (m)\n u = Expand (t, size)\n n = Div (m, u)\n",
    "the softmax's own": "s = ReduceSum (p, last)\n n = Div (p, s)\n",
}


def refusal(body: str, last: str = "n"):
    text = SOFTMAX + body + f"out = MatMul ({last}, v)\n"
    site = graphs.only(graphs.fuse(graphs.model(text, inputs=INPUTS, constants=CONSTANTS))[1])
    assert site.status == "refused"
    assert site.reason is not None
    return site.reason


@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
def test_a_second_division_by_the_sum_is_named(body: str) -> None:
    reason = refusal(body)
    assert reason.code == "probabilities_changed"
    assert "divided by the sum of each row once more" in reason.text


def test_a_division_by_another_sum_is_none() -> None:
    reason = refusal(MASKED + "s = ReduceSum (keep, last)\n n = Div (m, s)\n")
    assert (reason.code, "sum" in reason.text) == ("probabilities_changed", False)


def test_a_product_that_is_written_out_is_still_one() -> None:
    body = "wide = Unsqueeze (p, last)\n vs = Unsqueeze (v, ax2)\n m = Mul (wide, vs)\n"
    body += "out = ReduceSum <keepdims = 0> (m, ax3)\n"
    proto = graphs.model(SOFTMAX + body, inputs=INPUTS, constants=CONSTANTS)
    site = graphs.only(graphs.fuse(proto)[1])
    assert site.reason is not None
    assert site.reason.code == "product_form"


@pytest.mark.parametrize(
    ("lines", "outputs", "advised"),
    [
        ("r = Relu (probs)\n o = MatMul (probs, v)\n p = MatMul (r, v)\n out = Add (o, p)\n", graphs.OUT, False),
        ("out = MatMul (probs, v)\n", graphs.OUT + ", float[B, 4, S, T] probs", True),
        ("w = Relu (probs)\n out = MatMul (probs, v)\n", graphs.OUT + ", float[B, 4, S, T] w", True),
    ],
)
def test_who_reads_the_probabilities_again_is_told_what_helps_there(lines: str, outputs: str, advised: bool) -> None:
    """``need_weights`` gives an output; it does nothing to a layer that computes with the probabilities."""
    body = graphs.PRODUCT + "probs = Softmax <axis = -1> (scaled)\n" + lines
    reason = graphs.only(find(ir.from_proto(graphs.model(body, outputs=outputs)))).reason
    assert reason is not None
    assert reason.code == "probabilities_used"
    assert ("need_weights" in reason.action) == advised
