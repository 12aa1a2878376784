# SPDX-License-Identifier: Apache-2.0
"""Attention inside local functions is fused and proven; functions that cannot become part of the graph stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from exporter.scaled import run_scaled
from exporter.torch_exports import run

import flash_export
from flash_export import pipeline
from flash_export.find import find
from flash_export.inline import functions_with, inline
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.patterns import PATTERNS
from flash_export.rewrite import rewrite
from flash_export.talk import Talk

ATTEND = """
<domain: "local", opset_import: ["" : {opset}]>
Attend <scale: float = 0.25> (q, k, v) => (r) {{
  factor = Constant <value_float: float = @scale> ()
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  s = MatMul (q, kt)
  scaled = Mul (s, factor)
  p = Softmax <axis = -1> (scaled)
  r = MatMul (p, v)
}}
"""
LAYER = """
<domain: "local", opset_import: ["" : 18, "local" : 1]>
Layer (x, w) => (y) {{
  shape = Constant <value = int64[4] {{0, 0, 4, 8}}> ()
  join = Constant <value = int64[3] {{0, 0, 32}}> ()
  table = Constant <value = float[1, 1, 32] {{{numbers}}}> ()
  m = MatMul (x, w)
  shifted = Add (m, table)
  h = Reshape (shifted, shape)
  t = Transpose <perm = [0, 2, 1, 3]> (h)
  o = local.Attend <scale = 0.5> (t, t, t)
  back = Transpose <perm = [0, 2, 1, 3]> (o)
  merged = Reshape (back, join)
  y = Add (x, merged)
}}
"""
MAIN = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
main (float[B, S, 32] x, float[32, 32] w1, float[32, 32] w2) => (float[B, S, 32] y)
{ h = local.Layer (x, w1)
  y = local.Layer (h, w2) }
"""


def nested(opset: int = 18) -> onnx.ModelProto:
    """Two calls of a layer that calls an attention, each a function."""
    numbers = ", ".join(f"{i / 32:.4f}" for i in range(32))
    proto = onnx.parser.parse_model(MAIN + LAYER.format(numbers=numbers) + ATTEND.format(opset=opset))
    onnx.checker.check_model(proto)
    return proto


def feeds() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [(random.standard_normal(s) / 3).astype(np.float32) for s in ((2, 5, 32), (32, 32), (32, 32))]


def test_attention_in_functions_of_functions_is_fused_at_every_call() -> None:
    proto = nested()
    model = ir.from_proto(proto)
    sites = find(model)
    assert [s.status for s in sites] == ["fused", "fused"]
    assert len({s.name for s in sites}) == 2
    assert {s.attributes.scale for s in sites if s.attributes is not None} == {0.5}
    rewrite(model, sites)
    fused = ir.to_proto(model)
    assert sum(n.domain == DOMAIN for n in fused.graph.node) == 2
    assert {f.domain for f in fused.functions} == {DOMAIN}
    right, got = run(proto.SerializeToString(), feeds())[0], run(fused.SerializeToString(), feeds())[0]
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


@pytest.mark.parametrize("fault", [1.0, 1.01])
def test_the_check_proves_each_of_them_alone(fault: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(nested(), tmp_path / "in.onnx")

    result = run_scaled(tmp_path, fault, monkeypatch, at=-1)
    if result is None:
        return
    check = result.report["check"]
    assert isinstance(check, dict)
    alone = {r["name"] for r in check["runs"] if r["kind"] == "site" and r["passed"]}
    assert alone == {s.name for s in result.sites}


def test_attention_in_a_function_of_another_opset_that_says_the_same_is_fused() -> None:
    proto = nested(opset=17)
    model = ir.from_proto(proto)
    sites = find(model)
    assert [s.status for s in sites] == ["fused", "fused"]
    rewrite(model, sites)
    right, got = run(proto.SerializeToString(), feeds())[0], run(ir.to_proto(model).SerializeToString(), feeds())[0]
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


def test_a_function_of_an_opset_that_says_another_thing_stays_and_says_so() -> None:
    proto = nested()
    next(f for f in proto.functions if f.name == "Attend").opset_import[0].version = 12  # its Softmax flattens
    model = ir.from_proto(proto)
    before = ir.to_proto(model)
    sites = find(model)
    assert [s.status for s in sites] == ["refused"]
    assert sites[0].reason is not None
    assert sites[0].reason.code == "subgraph"
    assert "opset 12" in sites[0].reason.text
    assert "is not the same in both" in sites[0].reason.text
    assert ir.to_proto(model) == before


GATED = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
main (bool c, float[B, 3, S, 8] q, float[B, 3, S, 8] k, float[B, 3, S, 8] v) => (float[B, 3, S, 8] y)
{ gated = local.Gate (c, q)
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  s = MatMul (gated, kt)
  p = Softmax <axis = -1> (s)
  y = MatMul (p, v) }
<domain: "local", opset_import: ["" : %OPSET]>
Gate (c, x) => (r) {
  %BODY
}
"""
PRODUCT = "s = Sigmoid (x) r = Mul (x, s)"
BRANCHES = (
    "r = If (c) <then_branch = t () => (a) { m = ReduceMax <axes = [3]> (x) a = Sub (x, m) },"
    " else_branch = e () => (b) { b = Identity (x) }>"
)


@pytest.mark.parametrize(
    ("opset", "body", "reference"),
    [(15, PRODUCT, "float64"), (20, PRODUCT, "float64"), (17, BRANCHES, "float32")],
)
def test_attention_beside_a_function_of_another_opset_is_fused_and_proven(
    opset: int, body: str, reference: str, tmp_path: Path
) -> None:
    """onnx's checker looks into no branch, where an operator may be another one than in the graph."""
    proto = onnx.parser.parse_model(GATED.replace("%OPSET", str(opset)).replace("%BODY", body))
    onnx.save(proto, tmp_path / "in.onnx")
    options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx")
    result = pipeline.run(options, Talk(quiet=True))
    assert [s.status for s in result.sites] == ["fused"]
    check = result.report["check"]
    assert isinstance(check, dict)
    assert {r["reference"] for r in check["runs"] if r["kind"] == "model"} == {reference}
    if body is BRANCHES:
        return  # which ONNX Runtime does not load
    random = np.random.default_rng(3)
    given = [np.array(True), *(random.standard_normal((2, 3, 5, 8)).astype(np.float32) for _ in range(3))]
    right, got = run(proto.SerializeToString(), given)[0], run((tmp_path / "out.onnx").read_bytes(), given)[0]
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


def test_functions_stay_where_nothing_in_them_is_fused() -> None:
    proto = nested()
    attend = next(f for f in proto.functions if f.name == "Attend")
    attend.node.insert(4, onnx.helper.make_node("Relu", ["scaled"], ["bent"]))
    attend.node[5].input[0] = "bent"
    model = ir.from_proto(proto)
    before = ir.to_proto(model)
    sites = find(model)
    assert [(s.status, s.reason.code if s.reason else "") for s in sites] == [("refused", "unknown_operator")]
    assert ir.to_proto(model) == before


def test_a_large_constant_of_a_body_is_kept_once() -> None:
    proto = nested()
    layer = next(f for f in proto.functions if f.name == "Layer")
    table = next(n for n in layer.node if n.output[0] == "table")
    tensor = onnx.numpy_helper.from_array(np.tile(np.arange(32, dtype=np.float32), (1, 20, 1)), "table")
    table.attribute[0].t.CopyFrom(tensor)
    model = ir.from_proto(proto)
    assert {name for _, name, _ in functions_with(model, PATTERNS)} == {"Attend", "Layer"}
    inline(model, PATTERNS)
    large = [n for n in ir.to_proto(model).graph.node if n.op_type == "Constant" and n.attribute[0].t.ByteSize() > 1024]
    assert len(large) == 1


def test_a_number_that_each_call_of_a_function_gives_is_no_constant() -> None:
    """``value_int = @n`` has no value of its own in the function."""
    function = onnx.parser.parse_function(
        '<domain: "acme", opset_import: ["" : 18]> F <n> (x) => (y) { c = Constant <value_int: int = @n> ()\n'
        "s = Cast <to = 1> (c)\n p = Mul (x, s)\n y = Softmax <axis = -1> (p) }"
    )
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["b", 8]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("F", ["x"], ["y"], domain="acme", n=2)], "g", [x], [y])
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("acme", 1)]
    model = onnx.helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=9)
    result = flash_export.rewrite(model, allow_none=True)
    assert not result.fused
