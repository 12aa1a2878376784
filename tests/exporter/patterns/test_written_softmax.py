# SPDX-License-Identifier: Apache-2.0
"""A softmax that is written out between two products is named; one that is no attention's is no site."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import fuse, model, only

from flash_export.find import find

LAST = graphs.CONSTANTS + ", int64[1] m1 = {-1}"
LEVEL = "top = ReduceMax <keepdims = 1> (scaled, m1)\n low = Sub (scaled, top)\n e = Exp (low)\n"
SUM = "sum = ReduceSum <keepdims = 1> (e, m1)\n"
FORMS = {
    "quotient": LEVEL + SUM + "p = Div (e, sum)\n out = MatMul (p, v)\n",
    "quotient of the product": LEVEL + SUM + "u = MatMul (e, v)\n out = Div (u, sum)\n",
    "softmax off by one": LEVEL + SUM + "more = Add (sum, half)\n p = Div (e, more)\n out = MatMul (p, v)\n",
    "logarithm of the sum": "z = ReduceLogSumExp <keepdims = 1> (scaled, m1)\n l = Sub (scaled, z)\n p = Exp (l)\n"
    " out = MatMul (p, v)\n",
    "quotient by it": "z = ReduceLogSumExp <keepdims = 1> (scaled, m1)\n e = Exp (scaled)\n sum = Exp (z)\n"
    " p = Div (e, sum)\n out = MatMul (p, v)\n",
    "its negative, of no axis": "z = ReduceLogSumExp <keepdims = 0> (scaled, m1)\n n = Neg (z)\n"
    " u = Unsqueeze (n, m1)\n l = Add (scaled, u)\n p = Exp (l)\n out = MatMul (p, v)\n",
    "logarithm of the sum, written out": LEVEL + "z = ReduceLogSum <keepdims = 1> (e, m1)\n l = Sub (low, z)\n"
    " p = Exp (l)\n out = MatMul (p, v)\n",
    "all of it written out": LEVEL + SUM + "z = Log (sum)\n l = Sub (low, z)\n p = Exp (l)\n out = MatMul (p, v)\n",
    "norm": LEVEL + "sum = ReduceL1 <keepdims = 1> (e, m1)\n p = Div (e, sum)\n out = MatMul (p, v)\n",
    "powers of two": "e = Pow (two, scaled)\n" + SUM + "p = Div (e, sum)\n out = MatMul (p, v)\n",
    "logarithm": "l = LogSoftmax <axis = -1> (scaled)\n p = Exp (l)\n out = MatMul (p, v)\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_a_softmax_that_is_written_out_is_refused_by_name(name: str) -> None:
    proto = model(graphs.PRODUCT + FORMS[name], constants=LAST + ", float half = {0.5}, float two = {2.0}")
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.code == "softmax_written_out"
    assert [node.op_type for node in fused.graph.node] == [node.op_type for node in proto.graph.node]


OTHERS = {
    "a logarithm of a sum beside it": "z = ReduceLogSumExp <keepdims = 1> (q, m1)\n l = Sub (q, z)\n out = Exp (l)\n",
    "an activation": "out = Exp (q)\n",
    "scores to the power of two, over their sum": graphs.PRODUCT
    + "e = Pow (scaled, scale)\n"
    + SUM
    + "p = Div (e, sum)\n out = MatMul (p, v)\n",
    "a classifier's head": "out = LogSoftmax <axis = -1> (q)\n",
    "exponentials between products": graphs.PRODUCT + "e = Exp (scaled)\n out = MatMul (e, v)\n",
    "a softmax without a product behind": graphs.PRODUCT + LEVEL + SUM + "p = Div (e, sum)\n",
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_exponential_is_no_site(name: str) -> None:
    body = OTHERS[name]
    if "out =" in body:
        proto = model(body, constants=LAST)
    else:
        proto = model(body, constants=LAST, outputs="float[B, 4, S, T] p")
    assert find(ir.from_proto(proto)) == []
