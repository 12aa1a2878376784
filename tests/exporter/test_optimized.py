# SPDX-License-Identifier: Apache-2.0
"""Graphs that ONNX Runtime's optimizer has been over: its own operators around attention are read, never overlooked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from exporter.graphs import only
from exporter.torch_exports import run

from flash_export import pipeline
from flash_export.find import find
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.rewrite import rewrite
from flash_export.runtime import open_float64
from flash_export.sites import Site
from flash_export.talk import Talk

B, S, T, H, D = 2, 5, 7, 4, 8


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>\n{text.replace("Fused", "com.microsoft.Fused")}'
    )


def fuse(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Site]]:
    model = ir.from_proto(proto)
    sites = find(model)
    rewrite(model, sites)
    return ir.to_proto(model), sites


def numbers(proto: onnx.ModelProto, sizes: dict[str, int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shapes = [[d.dim_value or sizes[d.dim_param] for d in v.type.tensor_type.shape.dim] for v in proto.graph.input]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


HEADS_FIRST = f"float[B, {H}, S, {D}] q, float[B, {H}, T, {D}] k, float[B, {H}, T, {D}] v"
LENGTH_FIRST = f"float[S, B, {H}, {D}] q, float[T, B, {H}, {D}] k, float[T, B, {H}, {D}] v"
OUT = f"float[B, {H}, S, {D}] o"
PRODUCTS = {
    "scale": (HEADS_FIRST, "s = FusedMatMul <alpha = 0.3, transB = 1> (q, k)", "o = FusedMatMul (p, v)", 0.3),
    "weighted": (HEADS_FIRST, "s = FusedMatMul <transB = 1> (q, k)", "o = FusedMatMul <alpha = 2.0> (p, v)", 1.0),
    "transposed": (
        f"float[B, {H}, {D}, S] q, float[B, {H}, T, {D}] k, float[B, {H}, {D}, T] v",
        "s = FusedMatMul <alpha = 0.3, transA = 1, transB = 1> (q, k)",
        "o = FusedMatMul <transB = 1> (p, v)",
        0.3,
    ),
    "length_first": (
        LENGTH_FIRST,
        "s = FusedMatMul <alpha = 0.3, transBatchA = 1, transBatchB = 1, transB = 1> (q, k)",
        "o = FusedMatMul <transBatchB = 1> (p, v)",
        0.3,
    ),
    "depth_first": (
        f"float[{D}, B, {H}, S] q, float[{D}, B, {H}, T] k, float[T, B, {H}, {D}] v",
        "s = FusedMatMul <transBatchA = 1, transA = 1, transBatchB = 1> (q, k)",
        "o = FusedMatMul <transBatchB = 1> (p, v)",
        1.0,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_scale_and_transposes_is_read_as_that(name: str) -> None:
    inputs, first, second, scale = PRODUCTS[name]
    proto = parse(f"main ({inputs}) => ({OUT}) {{\n {first}\n p = Softmax <axis = -1> (s)\n {second} }}")
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert site.attributes.scale == pytest.approx(scale)
    assert "FusedMatMul" not in [n.op_type for n in fused.graph.node]
    arrays = numbers(proto, {"B": B, "S": S, "T": T})
    right, got = run(proto.SerializeToString(), arrays)[0], run(fused.SerializeToString(), arrays)[0]
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)


def test_a_factor_of_each_head_goes_into_q_where_the_product_keeps_its_rows() -> None:
    text = "main ({}, float[4, 1, 1] f) => ({}) {{\n {}\n t = Mul (s, f)\n p = Softmax <axis = -1> (t)\n {} }}"
    results = {}
    for name in ("scale", "transposed"):
        inputs, first, second, _ = PRODUCTS[name]
        results[name] = only(fuse(parse(text.format(inputs, OUT, first, second)))[1])
    assert results["scale"].status == "fused"
    assert results["transposed"].reason is not None
    assert results["transposed"].reason.code == "scale_not_scalar"


@pytest.mark.parametrize(("bias", "inner"), [("B, 1, 1, T", 1), ("1, 1, S, T", 0)])
def test_the_softmax_that_adds_a_bias_itself_is_an_anchor(bias: str, inner: int) -> None:
    """ONNX Runtime has no kernel for it on a CPU: what it was fused from is the reference."""
    body = "main ({}, float[{}] m) => ({}) {{\n s = FusedMatMul <transB = 1> (q, k)\n {}\n o = MatMul (p, v) }}"
    inside = f"p = com.microsoft.BiasSoftmax <axis = 3, is_inner_broadcast = {inner}> (s, m)"
    apart = "t = Add (s, m)\n p = Softmax <axis = -1> (t)"
    proto, reference = (parse(body.format(HEADS_FIRST, bias, OUT, how)) for how in (inside, apart))
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    arrays = numbers(proto, {"B": B, "S": S, "T": T})
    right, got = run(reference.SerializeToString(), arrays)[0], run(fused.SerializeToString(), arrays)[0]
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)


def test_a_bias_softmax_over_more_than_the_keys_is_refused() -> None:
    text = "main ({}, float[1, 1, S, T] m) => ({}) {{\n s = FusedMatMul <transB = 1> (q, k)\n {}\n o = MatMul (p, v) }}"
    proto = parse(text.format(HEADS_FIRST, OUT, "p = com.microsoft.BiasSoftmax <axis = 2> (s, m)"))
    reason = only(find(ir.from_proto(proto))).reason
    assert reason is not None
    assert reason.code == "softmax_flattens"


def test_the_measure_of_rounding_is_a_float64_product_too(tmp_path: Path) -> None:
    """In float32 between two Casts it would show no rounding, and right attention would fail by what it shows."""
    text = "main (float[2, 3, 5] a, float[2, 7, 5] b) => (float[2, 3, 7] y) { y = FusedMatMul <transB = 1> (a, b) }"
    a, b = (np.random.default_rng(i).standard_normal((2, n, 5)) for i, n in enumerate((3, 7)))
    (product,) = open_float64(ir.from_proto(parse(text)), tmp_path).run({"a": a, "b": b})
    np.testing.assert_allclose(product, a @ b.swapaxes(1, 2), rtol=1e-12)


DECODER = f"""
main (float[batch, seq, 32] x, float[32] g, float[32, 32] wq, float[32, 16] wk, float[32, 16] wv, float[32, 32] wo)
  => (float[batch, seq, 32] y)
<int64[4] of_q = {{0, 0, {H}, {D}}}, int64[4] of_kv = {{0, 0, 2, {D}}}, int64[1] ax2 = {{2}}, int64[1] ax0 = {{0}},
 int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{2}}, int64 i3 = {{3}}, int64[1] groups = {{2}},
 int64[1] heads = {{{H}}}, float scale = {{0.25}}, int64[3] whole = {{0, 0, 32}}, float two = {{2.0}},
 float eps = {{0.001}}>
{{
  square = Pow (x, two)
  mean = ReduceMean <axes = [-1]> (square)
  safe = Add (mean, eps)
  root = Sqrt (safe)
  norm = Div (x, root)
  n = Mul (g, norm)
  q0 = MatMul (n, wq)
  k0 = MatMul (n, wk)
  v0 = MatMul (n, wv)
  q1 = Reshape (q0, of_q)
  k1 = Reshape (k0, of_kv)
  v1 = Reshape (v0, of_kv)
  q = Transpose <perm = [0, 2, 1, 3]> (q1)
  k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
  v2 = Transpose <perm = [0, 2, 1, 3]> (v1)
  sizes = Shape (v2)
  b0 = Gather <axis = 0> (sizes, i0)
  s0 = Gather <axis = 0> (sizes, i2)
  d0 = Gather <axis = 0> (sizes, i3)
  h0 = Gather <axis = 0> (sizes, i1)
  b = Unsqueeze (b0, ax0)
  s = Unsqueeze (s0, ax0)
  d = Unsqueeze (d0, ax0)
  h = Unsqueeze (h0, ax0)
  wide = Concat <axis = 0> (b, h, groups, s, d)
  flat = Concat <axis = 0> (b, heads, s, d)
  k3 = Unsqueeze (k2, ax2)
  k4 = Expand (k3, wide)
  k = Reshape (k4, flat)
  v3 = Unsqueeze (v2, ax2)
  v4 = Expand (v3, wide)
  v = Reshape (v4, flat)
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q, kt)
  scaled = Mul (scores, scale)
  p = Softmax <axis = -1> (scaled)
  o = MatMul (p, v)
  back = Transpose <perm = [0, 2, 1, 3]> (o)
  joined = Reshape (back, whole)
  out = MatMul (joined, wo)
  y = Add (x, out)
}}
"""
"""A pre-norm layer with grouped queries whose sizes are computed in the graph."""


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED", "ALL"])
def test_what_onnx_runtime_saves_is_fused_and_proven(level: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    proto = parse(DECODER)
    for value in list(proto.graph.input)[1:]:  # the weights: inputs of the text form
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = random.standard_normal(shape).astype(np.float32) / 5
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        proto.graph.input.remove(value)
    onnx.save(proto, tmp_path / "in.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(str(tmp_path / "in.onnx"), options, providers=["CPUExecutionProvider"])
    there = {n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert ("FusedMatMul" in there) == ("SimplifiedLayerNormalization" in there) == (level != "BASIC"), there
    source, output = tmp_path / "optimized.onnx", tmp_path / "out.onnx"
    result = pipeline.run(Options(source=source, output=output), Talk(quiet=True))
    assert [s.status for s in result.sites] == ["fused"]
    nodes = [n for n in onnx.load(output).graph.node if n.domain == DOMAIN]
    assert [n.op_type for n in nodes] == ["FlashAttention"]
    assert result.sites[0].attributes is not None
    assert result.sites[0].attributes.kv_num_heads == 2


def test_types_are_known_below_the_sum_that_a_norm_hands_on() -> None:
    """Output 3 of SkipLayerNormalization; neither the file nor onnx says what it is."""
    text = f"""main (float[B, S, 32] x, float[B, S, 32] r, float[32] g) => (float[B, S, 32] y)
    <int64[4] apart = {{0, 0, {H}, {D}}}, int64[3] whole = {{0, 0, 32}}> {{
      n, mean, deviation, sum = com.microsoft.SkipLayerNormalization (x, r, g)
      h1 = Reshape (sum, apart)
      h = Transpose <perm = [0, 2, 1, 3]> (h1)
      s = FusedMatMul <transB = 1> (h, h)
      p = Softmax <axis = -1> (s)
      o = MatMul (p, h)
      back = Transpose <perm = [0, 2, 1, 3]> (o)
      y = Reshape (back, whole)
    }}"""
    site = only(find(ir.from_proto(parse(text))))
    assert site.status == "fused", site.reason
    assert site.head_dim == D
