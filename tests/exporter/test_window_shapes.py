# SPDX-License-Identifier: Apache-2.0
"""The length behind a convolution or a pooling is the quotient that it is, however the graph writes it."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter.graphs import both, fuse, length_at, model, only
from exporter.torch_exports import run

from flash_export.dims import Dim
from flash_export.shapes import Shapes

N = Dim.named("N")


@pytest.mark.parametrize("seed", range(12))
def test_a_chain_of_windows_is_as_long_as_onnx_runtime_makes_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    lines, value = [], "x"
    for index in range(3):
        kernel, stride, dilation = (int(i) for i in random.integers(1, 5, 3))
        begin, end = (int(i) for i in random.integers(0, kernel, 2))
        operator = ("Conv", "MaxPool", "AveragePool")[index]
        dilated = "" if operator == "AveragePool" else f", dilations = [{dilation}]"
        pads = 'auto_pad = "VALID"' if seed % 4 == 3 else f"pads = [{begin}, {end}]"
        weight = f"w{index} = Constant <value = float[2, 2, {kernel}] {{{', '.join(['0.1'] * 4 * kernel)}}}> ()\n"
        call = f"{value}, w{index}" if operator == "Conv" else value
        named = "" if operator == "Conv" else f"kernel_shape = [{kernel}], "
        lines.append(weight + f"y{index} = {operator} <{named}strides = [{stride}]{dilated}, {pads}> ({call})\n")
        value = f"y{index}"
    proto = model("".join(lines) + f"out = Relu ({value})\n", inputs="float[1, 2, N] x", outputs="float[1, 2, M] out")
    graph = ir.from_proto(proto).graph
    known = Shapes(graph)
    shape = known.shape(graph[-1].inputs[0])
    assert shape is not None
    assert shape[:2] == (Dim.of(1), Dim.of(2))
    for n in (150, 151, 152, 153, 157, 160, 200, 255):
        result = run(proto.SerializeToString(), [np.ones((1, 2, n), np.float32)])[0]
        assert length_at(known, shape[2], {"N": n}) == result.shape[2]


@pytest.mark.parametrize("attribute", ["ceil_mode = 1", 'auto_pad = "SAME_UPPER"'])
def test_a_length_that_is_rounded_up_is_left_to_the_file(attribute: str) -> None:
    body = f"out = MaxPool <kernel_shape = [3], strides = [2], {attribute}> (x)\n"
    graph = ir.from_proto(model(body, inputs="float[1, 2, N] x", outputs="float[1, 2, M] out")).graph
    assert str(Shapes(graph).shape(graph[-1].outputs[0])) == "(1, 2, M)"


@pytest.mark.parametrize("attribute", ["strides", "dilations", "pads", "kernel_shape"])
def test_attributes_for_fewer_axes_than_there_are_say_nothing(attribute: str) -> None:
    proto = model(
        "out = Conv (x, w)\n", inputs="float[1, 2, N, M] x, float[2, 2, 3, 3] w", outputs="float[1, 2, H, W] out"
    )
    proto.graph.node[-1].attribute.append(onnx.helper.make_attribute(attribute, [1]))
    graph = ir.from_proto(proto).graph
    assert str(Shapes(graph).shape(graph[-1].outputs[0])) == "(1, 2, H, W)"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (N - Dim.of(10), N),
        (N * Dim.of(5) + Dim.of(3), Dim.of(3)),
        (N * Dim.of(7) + Dim.of(4), N * Dim.of(2) + Dim.of(4)),
    ],
)
def test_quotients_differ_by_the_multiples_that_were_in_them(a: Dim, b: Dim) -> None:
    known = Shapes(ir.Graph([], [], nodes=[]))
    difference = known.quotient(a, 5) - known.quotient(b, 5)
    assert difference.divided(Dim.of(1)) == difference
    for n in (11, 12, 13, 14, 15):
        assert length_at(known, difference, {"N": n}) == (a.evaluate({"N": n}) // 5) - (b.evaluate({"N": n}) // 5)


def test_a_quotient_of_a_quotient_is_one_and_others_are_not_the_same() -> None:
    known = Shapes(ir.Graph([], [], nodes=[]))
    assert known.quotient(known.quotient(N, 5) - Dim.of(1), 2) == known.quotient(N - Dim.of(5), 10)
    assert known.quotient(N, 5) != known.quotient(N + Dim.of(1), 5)
    assert known.quotient(N, 5) != known.quotient(N, 10)


ROWS = (
    "y = Conv <strides = [5]> (x, w)\n t = Transpose <perm = [0, 2, 1]> (y)\n s = Shape (x)\n n = Gather (s, i2)\n"
    "n1 = Sub (n, i10)\n n2 = Div (n1, i5)\n n3 = Add (n2, i1)\n l = Reshape (n3, m1)\n"
    "n4 = Add (n2, {one})\n l2 = Reshape (n4, m1)\n b = Slice (s, ax0, ax1)\n"
    "bh = Mul (b, heads)\n split = Concat <axis = 0> (b, l, hd)\n flat = Concat <axis = 0> (bh, l, d)\n"
    "t4 = Reshape (t, split)\n t5 = Transpose <perm = [0, 2, 1, 3]> (t4)\n q = Reshape (t5, flat)\n"
    "k = Transpose <perm = [0, 2, 1]> (q)\n a = MatMul (q, k)\n to4 = Concat <axis = 0> (b, heads, l, l2)\n"
    "to3 = Concat <axis = 0> (bh, l, l2)\n a4 = Reshape (a, to4)\n a3 = Reshape (a4, to3)\n"
    "p = Softmax <axis = -1> (a3)\n out = MatMul (p, q)\n"
)
CONSTANTS = (
    "int64 i2 = {2}, int64 i10 = {10}, int64 i5 = {5}, int64 i1 = {1}, int64[1] m1 = {-1}, int64[1] ax0 = {0}, "
    "int64[1] ax1 = {1}, int64[1] heads = {3}, int64[2] hd = {3, 8}, int64[1] d = {8}"
)


def behind_conv(one: str, named: bool) -> onnx.ModelProto:
    weight = np.random.default_rng(4).standard_normal((24, 24, 10)).astype(np.float32) / 8
    proto = model(
        ROWS.replace("{one}", one),
        inputs="float[B, 24, N] x, float[24, 24, 10] w",
        outputs="float[M, L, 8] out",
        constants=CONSTANTS,
    )
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    if named:
        for name, dims in (("y", ["B", 24, "rows"]), ("t", ["B", "rows", 24]), ("q", ["H", "rows", 8])):
            proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims))
    return proto


@pytest.mark.parametrize("named", [False, True])
def test_attention_over_a_length_computed_beside_a_convolution_is_fused(named: bool) -> None:
    """As speech encoders write it: the length of their rows by the convolution's formula, from the samples."""
    proto = behind_conv("i1", named)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    for batch, samples in ((2, 60), (3, 104), (1, 10)):
        x = np.random.default_rng(samples).standard_normal((batch, 24, samples)).astype(np.float32)
        expected, got = both(proto, fused, [x])
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("named", [False, True])
def test_another_length_than_the_convolution_s_is_not_taken_for_it(named: bool) -> None:
    """One key more: the file runs nowhere."""
    reason = only(fuse(behind_conv("i2", named))[1]).reason
    assert reason is not None
    assert reason.code == "scores_layout"
    length = "rows" if named else "L"
    assert f"from [3*B, {length}, {length}] to [B, 3, {length}, (N)//5]" in reason.text


def strided(names: list[str]) -> onnx.ModelProto:
    """Windows of stride 2 in a row, whose outputs are declared with these names; ``x`` has the length ``seq``."""
    weight = np.random.default_rng(3).standard_normal((8, 8, 3)).astype(np.float32) / 4
    lines = [f"y{i + 1} = Conv <strides = [2], pads = [1, 1]> (y{i}, w)\n" for i in range(len(names))]
    rest = (
        f"q = Transpose <perm = [0, 2, 1]> (y{len(names)})\n a = MatMul (q, y{len(names)})\n"
        "p = Softmax <axis = -1> (a)\n out = MatMul (p, q)\n"
    )
    proto = model("".join(lines) + rest, inputs="float[B, 8, seq] y0, float[8, 8, 3] w", outputs="float[B, L, 8] out")
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    for index, name in enumerate(names):
        proto.graph.value_info.append(
            onnx.helper.make_tensor_value_info(f"y{index + 1}", onnx.TensorProto.FLOAT, ["B", 8, name])
        )
    return proto


@pytest.mark.parametrize("names", [["seq", "seq"], ["half", "seq"], ["half", "seq", "half"], ["half", "half", "seq"]])
def test_a_name_that_a_file_has_for_two_lengths_in_a_row_is_taken_for_the_first(names: list[str]) -> None:
    """``dynamic_axes`` with one name for what goes into a strided convolution and what comes out of it."""
    proto = strided(names)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    for batch, samples in ((2, 61), (1, 16), (3, 1)):
        x = np.random.default_rng(samples).standard_normal((batch, 8, samples)).astype(np.float32)
        expected, got = both(proto, fused, [x])
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_names_that_stand_for_each_other_end() -> None:
    """``a`` is half of ``b`` and ``b`` half of ``c``, by other inputs each; then ``c`` is said to be half of ``a``."""
    a, b, c = map(Dim.named, "abc")
    known = Shapes(ir.Graph([], [], nodes=[]))
    for name, of in ((a, b), (b, c), (c, a)):
        known._name(known._written_out(known.quotient(of, 2)), name)
    assert set(known._formulas) == {"a", "b"}
    assert known.quotient(a, 2) == known.quotient(c, 8)


def test_a_long_row_of_named_lengths_is_no_deep_recursion() -> None:
    known = Shapes(ir.Graph([], [], nodes=[]))
    dims = [Dim.named(f"m{i}") for i in range(1500)]
    for name, of in itertools.pairwise(dims):
        known._name(known._written_out(known.quotient(of, 2)), name)
    assert known.quotient(dims[0], 2) == known.quotient(dims[-1], 2**1500)
