# SPDX-License-Identifier: Apache-2.0
"""Whether a function's body may stand in a graph of another opset is told from the schemas of its operators."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from flash_export.function_opset import align

MODEL = """
<ir_version: 9, opset_import: ["" : {graph}, "local" : 1]>
main (float[B, 4] x) => (float[B, 4] y) {{ y = local.F (x) }}
<domain: "local", opset_import: ["" : {own}]>
F (x) => (y) {{ {body} }}
"""


@pytest.mark.parametrize(
    ("body", "own", "graph", "same"),
    [
        ("y = Sigmoid (x)", 15, 17, True),
        ("y = Sigmoid (x)", 20, 17, True),
        ("y = Sigmoid (x)", 12, 17, False),
        ("y = Cast <to = 1> (x)", 17, 21, False),
        ("y = Softmax <axis = -1> (x)", 13, 21, True),
        ("y = Softmax <axis = -1> (x)", 12, 13, False),
        ("y = Attention (x, x, x)", 23, 24, False),
        ("y = NoSuchOperator (x)", 15, 17, False),
        ("c = Tanh (x) y = Softmax (c)", 13, 12, False),
    ],
)
def test_a_function_takes_the_opset_of_the_graph_where_its_operators_are_the_same(
    body: str, own: int, graph: int, same: bool
) -> None:
    model = ir.from_proto(onnx.parser.parse_model(MODEL.format(body=body, own=own, graph=graph)))
    (function,) = model.functions.values()
    kept = align(model, model.functions)
    assert bool(kept) is not same
    assert function.opset_imports[""] == (graph if same else own)
    assert all(f"opset {own}" in why for why in kept.values())


def test_a_function_of_another_version_of_a_domain_of_its_own_stays() -> None:
    text = MODEL.format(body="y = local.G (x)", own=17, graph=17).replace('["" : 17]>\nF', '["" : 17, "local" : 2]>\nF')
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert list(align(model, model.functions).values()) == ["F is of opset 2, the graph of 1, of domain local"]
