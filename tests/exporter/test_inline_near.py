# SPDX-License-Identifier: Apache-2.0
"""Attention spread over several local functions, or with one between its products, is found and proven."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from exporter.scaled import run_scaled
from exporter.torch_exports import run

from flash_export.find import find
from flash_export.inline import NEAR, functions_with, inline_near
from flash_export.op import DOMAIN
from flash_export.patterns import PATTERNS
from flash_export.rewrite import rewrite

MAIN = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
main (float[B, 3, S, 8] q, float[B, 3, T, 8] k, float[B, 3, T, 8] v) => (float[B, 3, S, 8] out)
<float scale = {0.35}>
{ %BODY }
"""


def function(name: str, inputs: str, body: str, opset: int = 18) -> str:
    """A local function whose output is ``r``."""
    imports = f'"" : {opset}, "local" : 1'
    return f'<domain: "local", opset_import: [{imports}]>\n{name} ({inputs}) => (r) {{ {body} }}\n'


TIMES = function("Times", "a, b", "r = Mul (a, b)")
PRODUCT = function("Product", "a, b", "r = MatMul (a, b)")
TURNED = "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n"
APPLY = function("Apply", "s, v", "[weigh] p = Softmax <axis = -1> (s)\n r = MatMul (p, v)")
SCORES = function("Scores", "q, k", TURNED + "r = local.Product (q, kt)")
CASES = {
    "one function an operator": (
        TURNED + "s = local.Product (q, kt)\n t = local.Times (s, scale)\n p = Softmax <axis = -1> (t)\n"
        "out = local.Product (p, v)",
        PRODUCT + TIMES,
    ),
    "the scale alone": (
        TURNED + "s = MatMul (q, kt)\n t = local.Times (s, scale)\n p = Softmax <axis = -1> (t)\n out = MatMul (p, v)",
        TIMES,
    ),
    "the scores in one, the rest in another": (
        "s = local.Scores (q, k)\n t = local.Times (s, scale)\n out = local.Apply (t, v)",
        SCORES + APPLY + TIMES + PRODUCT,
    ),
    "queries that are made in one": (
        "s = local.Scores (q, k)\n t = local.Times (s, scale)\n out = local.Apply (t, v)",
        SCORES.replace("r = ", "made = Relu (q)\n r = ").replace("(q, kt)", "(made, kt)") + APPLY + TIMES + PRODUCT,
    ),
}


def parsed(body: str, functions: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(MAIN.replace("%BODY", body) + functions)
    onnx.checker.check_model(proto)
    return proto


def feeds() -> list[np.ndarray]:
    random = np.random.default_rng(2)
    return [random.standard_normal(s).astype(np.float32) for s in ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))]


@pytest.mark.parametrize("case", CASES)
def test_what_lies_in_functions_between_the_products_is_read(case: str) -> None:
    proto = parsed(*CASES[case])
    model = ir.from_proto(proto)
    sites = find(model)
    assert [s.status for s in sites] == ["fused"], sites[0].reason
    assert sites[0].attributes is not None
    assert sites[0].attributes.scale == pytest.approx(0.35)
    rewrite(model, sites)
    fused = ir.to_proto(model)
    assert sum(n.domain == DOMAIN for n in fused.graph.node) == 1
    right, got = run(proto.SerializeToString(), feeds())[0], run(fused.SerializeToString(), feeds())[0]
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


@pytest.mark.parametrize("fault", [1.0, 1.01])
@pytest.mark.parametrize("case", CASES)
def test_each_is_proven_alone(case: str, fault: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(parsed(*CASES[case]), tmp_path / "in.onnx")

    result = run_scaled(tmp_path, fault, monkeypatch)
    if result is None:
        return
    check = result.report["check"]
    assert isinstance(check, dict)
    assert {r["passed"] for r in check["runs"] if r["kind"] == "site"} == {True}


BENT = function("Scores", "q, k", TURNED + "s = MatMul (q, kt)\n r = Relu (s)")


@pytest.mark.parametrize(
    ("body", "functions", "site"),
    [
        ("s = local.Scores (q, k)\n [weigh] p = Softmax <axis = -1> (s)\n out = MatMul (p, v)", BENT, "weigh"),
        ("s = local.Scores (q, k)\n out = local.Apply (s, v)", BENT + APPLY, "weigh"),
        (
            "s = local.Scores (q, k)\n p = local.Weigh (s)\n out = MatMul (p, v)",
            BENT + function("Weigh", "s", "r = Softmax <axis = -1> (s)"),
            "r",
        ),
    ],
)
def test_what_cannot_be_fused_has_the_reason_that_lies_in_the_function(body: str, functions: str, site: str) -> None:
    model = ir.from_proto(parsed(body, functions))
    before = ir.to_proto(model)
    sites = find(model)
    assert [(s.name, s.status) for s in sites] == [(site, "refused")]
    assert sites[0].reason is not None
    assert sites[0].reason.text.startswith("Relu lies between")
    assert ir.to_proto(model) == before


def test_each_of_two_functions_has_the_reason_of_its_own_softmax() -> None:
    """Their nodes have no names, and are called the same once they are written out."""
    body = "s = local.Scores (q, k)\n y = local.Apply (s, v)\n t = local.Sharp (y, k)\n out = local.Again (t, v)"
    functions = BENT + APPLY + BENT.replace("Scores", "Sharp").replace("Relu", "Sin") + APPLY.replace("Apply", "Again")
    sites = find(ir.from_proto(parsed(body, functions.replace("[weigh]", ""))))
    assert [s.reason.text.split()[0] if s.reason else s.status for s in sites] == ["Relu", "Sin"]


def test_a_softmax_that_only_stands_beside_attention_is_none() -> None:
    body = "s = local.Scores (q, k)\n p = local.Apply (s, v)\n out = local.Class (p)"
    functions = BENT + APPLY + function("Class", "x", "[last] r = Softmax <axis = -1> (x)")
    sites = {s.name: s.status for s in find(ir.from_proto(parsed(body, functions)))}
    assert sites == {"weigh": "refused", "last": "not_attention"}


@pytest.mark.parametrize(("operators", "expected"), [(NEAR - 2, "fused"), (NEAR, "not_attention")])
def test_a_product_in_a_function_is_seen_as_far_as_the_page_says(
    operators: int, expected: str, repo_root: Path
) -> None:
    between = "".join(f"s{i + 1} = Neg (s{i})\n" for i in range(operators))
    body = f"s0 = local.Scores (q, k)\n{between} p = Softmax <axis = -1> (s{operators})\n out = MatMul (p, v)"
    assert [site.status for site in find(ir.from_proto(parsed(body, SCORES + PRODUCT)))] == [expected]
    assert f"among the {NEAR} operators nearest to a softmax" in (repo_root / "docs" / "finding.md").read_text()


def test_functions_that_are_not_near_or_call_themselves_stay() -> None:
    far = "".join(f"q{i + 1} = Neg (q{i})\n" for i in range(60)).replace("q0", "q")
    body = "x = local.Times (q, scale)\n" + far.replace("Neg (q)", "Neg (x)")
    body += "p = Softmax <axis = -1> (q60)\n out = Neg (p)"
    model = ir.from_proto(parsed(body, TIMES))
    assert not inline_near(model, PATTERNS)
    assert {s.status for s in find(model)} == {"not_attention"}
    assert [i[1] for i in model.functions] == ["Times"]


def test_a_function_of_another_opset_stays_a_call_and_the_others_do_not() -> None:
    old = function("Old", "x", "r = Softmax <axis = 3> (x)", opset=12)
    body = "o = local.Old (q)\n " + CASES["the scale alone"][0].replace("MatMul (q, kt)", "MatMul (o, kt)")
    model = ir.from_proto(onnx.parser.parse_model(MAIN.replace("%BODY", body) + TIMES + old))
    assert functions_with(model, PATTERNS)
    assert inline_near(model, PATTERNS)
    assert [i[1] for i in model.functions] == ["Old"]
