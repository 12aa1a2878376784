# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnx.parser
import onnx_ir as ir
import pytest

from flash_export import twin
from flash_export.runtime import Session, open_float64

HEAD = '<ir_version: 9, opset_import: ["": {opset}, "custom": 1]>'


def model(text: str, opset: int = 18) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(HEAD.format(opset=opset) + text))


def float32_twin(text: str, folder: Path) -> Session:
    converted = model(text)
    twin.to_float32(converted)
    assert all(v.dtype != ir.DataType.FLOAT16 for n in converted.graph for v in n.outputs)
    return Session(converted, folder)


# onnx's text form writes half-precision numbers as bits: 15360 is 1.0, 16384 is 2.0, 26624 is 2048.0.


def test_inputs_weights_constants_and_casts_of_a_half_model_become_float32(tmp_path: Path) -> None:
    session = float32_twin(
        """
        g (float16[n] x, float[n] y) => (float16[n] z) <float16[1] w = {26624}>
        {
          half = Constant<value = float16[1] {15360}>()
          y16 = Cast<to = 10>(y)
          a = Add(x, w)
          b = Add(a, half)
          z = Add(b, y16)
        }""",
        tmp_path,
    )
    (z,) = session.run({"x": np.array([1.0], np.float16), "y": np.array([0.0001220703125], np.float32)})
    assert z.dtype == np.float32
    assert z[0] == 2050.0001220703125, "float16 holds neither 2049 + 1 exactly nor the small summand"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_fill_of_finfo_min_stays_one_and_twice_the_fill_is_minus_infinity(dtype: type) -> None:
    low, high = ml_dtypes.finfo(dtype).min, ml_dtypes.finfo(dtype).max
    wide = twin.convert_array(np.array([low, high, -1.5, -np.inf, np.nan], dtype), np.dtype(np.float32))
    limits = np.finfo(np.float32)
    assert wide[:3].tolist() == [limits.min, limits.max, -1.5]
    assert np.isneginf(wide[3])
    assert np.isnan(wide[4])
    with np.errstate(over="ignore"):
        assert np.isneginf(wide[0] + wide[0])


def test_subgraphs_and_local_functions_are_converted_too(tmp_path: Path) -> None:
    session = float32_twin(
        """
        g (float16[n] x, bool c) => (float16[n] z)
        {
          y = If(c) <
            then_branch = t () => (float16[n] a) { one = Constant<value = float16[1] {15360}>() a = Add(x, one) },
            else_branch = e () => (float16[n] b) { b = Identity(x) }
          >
          z = custom.Half(y)
        }
        <domain: "custom", opset_import: ["": 18]>
        Half (x) => (y) { two = Constant<value = float16[1] {16384}>() y = Div(x, two) }""",
        tmp_path,
    )
    x = np.array([4097.0], np.float32)
    assert session.run({"x": x, "c": np.array(True)})[0][0] == 2049.0


def test_a_scale_computed_from_a_shape_keeps_its_half_rounding(tmp_path: Path) -> None:
    """The legacy exporter: 1/sqrt(D) from Shape, in float16. The rewrite has read the rounded number."""
    text = """
        g (float16[n,20] x) => (float16[n,20] z) <int64[1] axis = {1}>
        {
          shape = Shape(x)
          d = Gather(shape, axis)
          d16 = Cast<to = 10>(d)
          root = Sqrt(d16)
          z = Div(x, root)
        }"""
    ones = {"x": np.ones((1, 20), np.float32)}
    rounded_root = np.float32(np.sqrt(np.float16(20)))
    narrow = model(text)
    twin.to_float32(narrow)
    assert Session(narrow, tmp_path).run(ones)[0][0, 0] == np.float32(1) / rounded_root
    (z,) = open_float64(narrow, tmp_path).run(ones)
    assert z.dtype == np.float64
    assert z[0, 0] == 1 / np.float64(rounded_root)


def test_data_that_passes_through_half_precision_is_not_rounded_there(tmp_path: Path) -> None:
    session = float32_twin("g (float[n] x) => (float[n] z) { h = Cast<to = 10>(x)  z = Cast<to = 1>(h) }", tmp_path)
    x = np.array([1.0001], np.float32)
    assert session.run({"x": x})[0] == x


WIDE = """
    g (float[b,3,8,8] x, float[b,2,4] y) => (float[b,2,6,6] z, float[b,2,4] e, float[1] c)
    {
      half = Constant<value_float = 0.5>()
      shape = Constant<value_ints = [2, 3, 3, 3]>()
      w = Expand(half, shape)
      z = Conv(x, w)
      g = Erf(y)
      big = Constant<value_float = 3.0>()
      e = Mul(g, big)
      n = Constant<value_ints = [1]>()
      c = ConstantOfShape(n)
    }"""


def test_operators_without_a_float64_kernel_run_in_float32_between_casts(tmp_path: Path) -> None:
    session = open_float64(model(WIDE), tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 3, 8, 8)), rng.standard_normal((2, 2, 4))
    z, e, c = session.run({"x": x, "y": y})
    assert z.dtype == e.dtype == c.dtype == np.float64
    assert z.shape == (2, 2, 6, 6)
    window = x[0, :, :3, :3].sum() * 0.5
    assert z[0, 0, 0, 0] == pytest.approx(window, rel=1e-5)


def test_an_operator_that_nobody_listed_is_found_by_the_refusal_and_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list may be wrong for another ONNX Runtime: its refusal names the operator, and that one is fenced."""
    unlisted = model("g (float[n] x) => (float[n] y) { e = Erf(x) y = Exp(e) }")
    monkeypatch.setattr(twin, "_COMPUTES_IN_FLOAT64", twin._COMPUTES_IN_FLOAT64 | {"Erf"})
    (y,) = open_float64(unlisted, tmp_path).run({"x": np.array([0.0])})
    assert y.dtype == np.float64
    assert y[0] == 1.0


def test_a_float64_twin_is_exact_to_float64(tmp_path: Path) -> None:
    net = model(
        """
        g (float[b,s,5] x) => (float[b,s,5] z) <float[5] one = {1, 1, 1, 1, 1}>
        { t = Tanh(x) n = LayerNormalization(t, one) p = Softmax<axis = -1>(n) z = Mul(p, p) }"""
    )
    x = np.random.default_rng(1).standard_normal((2, 3, 5)).astype(np.float32)
    t = np.tanh(x.astype(np.float64))
    n = (t - t.mean(-1, keepdims=True)) / np.sqrt(t.var(-1, keepdims=True) + np.float64(np.float32(1e-5)))
    p = np.exp(n) / np.exp(n).sum(-1, keepdims=True)
    np.testing.assert_allclose(open_float64(net, tmp_path).run({"x": x})[0], p * p, rtol=1e-12)


BUCKETS = """
    g (float[n] x) => (int64[1] bucket, bool[1] reached, int64[n] of_data, float[1] rest)
    <float factor = {0.7}, float seven = {7.0}, float third = {0.333333343}>
    {
      n = Shape(x)
      length = Cast<to = 1>(n)
      scaled = Mul(length, factor)
      bucket = Cast<to = 7>(scaled)
      reached = GreaterOrEqual(scaled, seven)
      scaled_data = Mul(x, factor)
      of_data = Cast<to = 7>(scaled_data)
      rest = Mul(length, third)
    }"""


def test_what_a_length_decides_in_float32_it_decides_in_the_float64_twin_too(tmp_path: Path) -> None:
    """10 times 0.7 is 7 in float32 and less in float64. Only data may decide otherwise there: that is its rounding."""
    feeds = {"x": np.full(10, 10.0, np.float32)}
    for session in (Session(model(BUCKETS), tmp_path), open_float64(model(BUCKETS), tmp_path)):
        bucket, reached, of_data, rest = session.run(feeds)
        assert (bucket[0], reached[0]) == (7, True)
        assert of_data[0] == (7 if rest.dtype == np.float32 else 6)
    assert rest.dtype == np.float64
    assert rest[0] == 10 * np.float64(np.float32(0.333333343))


def test_the_roundoff_is_that_of_the_narrowest_float_type() -> None:
    assert twin.roundoff(model("g (float[n] x) => (float[n] y) { y = Exp(x) }")) == 1.0
    assert twin.roundoff(model("g (float16[n] x) => (float[n] y) { y = Cast<to = 1>(x) }")) == 2.0**13
    assert twin.roundoff(model("g (bfloat16[n] x) => (float[n] y) { y = Cast<to = 1>(x) }")) == 2.0**16


def test_weights_are_converted_when_they_are_read_and_the_original_is_untouched() -> None:
    original = model("g (float16[2] x) => (float16[2] y) <float16[2] w = {1, 2}> { y = Add(x, w) }")
    copy = original.clone()
    twin.to_float32(copy)
    assert isinstance(copy.graph.initializers["w"].const_value, ir.LazyTensor)
    assert original.graph.initializers["w"].dtype == ir.DataType.FLOAT16
    assert original.graph.inputs[0].dtype == ir.DataType.FLOAT16


def test_an_output_keeps_the_shape_that_it_was_declared_with() -> None:
    """onnx infers 0 keys for the scores that an Attention node gives out."""
    typeless = model(
        """
        g (float[B,2,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v) => (float[B,2,S,8] y, float[B,2,S,T] z)
        { y0, , , z = Attention <qk_matmul_output_mode = 3> (q, k, v)
          y = Identity (y0) }
        """,
        opset=23,
    )
    twin.infer_types(typeless)
    shapes = {str(value.name): value.shape for value in typeless.graph.outputs}
    assert shapes == {"y": ir.Shape(["B", 2, "S", 8]), "z": ir.Shape(["B", 2, "S", "T"])}
