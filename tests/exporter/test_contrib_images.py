# SPDX-License-Identifier: Apache-2.0
"""Operators of diffusion models that ONNX Runtime has for GPUs alone, written out, are what NumPy and PyTorch say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from exporter.torch_exports import run

from flash_export import contrib_twin, pipeline
from flash_export.options import Options
from flash_export.shapes import Shapes
from flash_export.talk import Talk

HEADER = '<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]>\n'
B, H, W, C = 2, 3, 5, 12


def parse(text: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEADER.format(opset=opset) + text)


def written(text: str, arrays: list[np.ndarray], opset: int = 18) -> list[np.ndarray]:
    """What the model gives once its operators are written out."""
    model = ir.from_proto(parse(text, opset))
    contrib_twin.write_out(model)
    assert not any(node.domain for node in model.graph)
    return run(ir.to_proto(model).SerializeToString(), arrays)


def numbers(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.random.default_rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)]


def normed(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, groups: int, silu: bool, epsilon: float) -> np.ndarray:
    """GroupNorm of ``[N, H, W, C]`` in float64."""
    apart = x.astype(np.float64).reshape(*x.shape[:3], groups, -1)
    mean, variance = apart.mean((1, 2, 4), keepdims=True), apart.var((1, 2, 4), keepdims=True)
    y = ((apart - mean) / np.sqrt(variance + epsilon)).reshape(x.shape) * gamma + beta
    return y / (1 + np.exp(-y)) if silu else y


@pytest.mark.parametrize("opset", [14, 18, 21])
@pytest.mark.parametrize("silu", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_group_norm(opset: int, silu: int, last: int) -> None:
    shape = f"{B},{H},{W},{C}" if last else f"{B},{C},{H},{W}"
    attributes = f"groups = 3, activation = {silu}, epsilon = 0.01" + ("" if last else ", channels_last = 0")
    text = (
        f"g (float[{shape}] x, float[{C}] a, float[{C}] b) => (float[{shape}] y) "
        f"{{ y = com.microsoft.GroupNorm <{attributes}> (x, a, b) }}"
    )
    x, a, b = numbers((B, H, W, C), (C,), (C,))
    x = 3 + 2 * x
    got = written(text, [x if last else x.transpose(0, 3, 1, 2), a, b], opset)[0]
    right = normed(x, a, b, 3, bool(silu), 0.01)
    np.testing.assert_allclose(got if last else got.transpose(0, 2, 3, 1), right, atol=2e-5)


@pytest.mark.parametrize("skip", [(B, H, W, C), (B, 1, 1, C), (B, C)])
@pytest.mark.parametrize("bias", [False, True])
def test_skip_group_norm(skip: tuple[int, ...], bias: bool) -> None:
    whole = f"float[{B},{H},{W},{C}]"
    inputs = f"{whole} x, float[{C}] a, float[{C}] b, float[{','.join(map(str, skip))}] s" + f", float[{C}] c" * bias
    text = (
        f"g ({inputs}) => ({whole} y, {whole} sum) "
        f"{{ y, sum = com.microsoft.SkipGroupNorm <groups = 4, activation = 1> (x, a, b, s{', c' * bias}) }}"
    )
    x, a, b, s, c = numbers((B, H, W, C), (C,), (C,), skip, (C,))
    total = x + (s[:, None, None] if len(skip) == 2 else s) + (c if bias else 0)
    y, got = written(text, [x, a, b, s, c][: 5 if bias else 4])
    np.testing.assert_allclose(got, total, atol=1e-6)
    np.testing.assert_allclose(y, normed(total, a, b, 4, True, 1e-5), atol=2e-5)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_convolution_with_its_channels_last(groups: int) -> None:
    text = (
        f"g (float[{B},{H},{W},{C}] x, float[6,3,2,{C // groups}] w, float[6] b) => (float[n,h,v,6] y) "
        f"{{ y = com.microsoft.NhwcConv <group = {groups}, strides = [1, 2], pads = [1, 0, 1, 0]> (x, w, b) }}"
    )
    x, w, b = numbers((B, H, W, C), (6, 3, 2, C // groups), (6,))
    first = (torch.tensor(a).double().permute(0, 3, 1, 2) for a in (x, w))
    right = torch.conv2d(*first, torch.tensor(b).double(), stride=(1, 2), padding=(1, 0), groups=groups)
    np.testing.assert_allclose(written(text, [x, w, b])[0], right.permute(0, 2, 3, 1).numpy(), atol=2e-5)


def test_a_gelu_of_one_half_times_the_other() -> None:
    text = (
        f"g (float[{B},{H},{C}] x, float[{C}] b) => (float[{B},{H},m] y) {{ y = com.microsoft.BiasSplitGelu (x, b) }}"
    )
    x, b = numbers((B, H, C), (C,))
    left, right = np.split((x + b).astype(np.float64), 2, axis=-1)
    gelu = right * 0.5 * (1 + np.vectorize(math.erf)(right / np.sqrt(2)))
    np.testing.assert_allclose(written(text, [x, b])[0], left * gelu, atol=1e-5)
    model = ir.from_proto(parse(text))
    (node,) = model.graph
    node.outputs[0].shape = None
    assert [d.static for d in Shapes(model.graph).shape(node.outputs[0]) or ()] == [B, H, C // 2]


def test_a_sum_of_three() -> None:
    rows = f"float[{B},{C}]"
    text = f"g ({rows} x, float[{C}] b, {rows} s) => ({rows} y) {{ y = com.microsoft.BiasAdd (x, b, s) }}"
    x, b, s = numbers((B, C), (C,), (B, C))
    np.testing.assert_allclose(written(text, [x, b, s])[0], x + b + s, atol=1e-6)


def block(dtype: str) -> onnx.ModelProto:
    """Attention over the pixels of an image behind a convolution and a norm, as a diffusion model has it."""
    text = f"""g ({dtype}[B, 6, 7, 8] x) => ({dtype}[B, 6, 7, 16] out)
    <{dtype}[16, 3, 3, 8] w, float[16] a, float[16] b, {dtype}[16, 48] p, int64[5] apart = {{0, 42, 2, 3, 8}},
     int64[4] image = {{0, 6, 7, 16}}, int64[3] rows = {{0, 42, 16}}>
    {{
      c = com.microsoft.NhwcConv <pads = [1, 1, 1, 1]> (x, w)
      h = com.microsoft.GroupNorm <groups = 4, activation = 1> (c, a, b)
      r = Reshape (h, rows)
      qkv = MatMul (r, p)
      packed = Reshape (qkv, apart)
      o = com.microsoft.MultiHeadAttention <num_heads = 2> (packed)
      back = Reshape (o, image)
      out, sum = com.microsoft.SkipGroupNorm <groups = 4, activation = 0> (back, a, b, c)
    }}"""
    model = parse(text)
    rng = np.random.default_rng(0)
    for value in list(model.graph.value_info):
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        array = (rng.standard_normal(dims) / 3).astype(kind)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        model.graph.value_info.remove(value)
    return model


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_the_attention_of_a_diffusion_model_is_fused_and_proven(dtype: str, tmp_path: Path) -> None:
    onnx.save(block(dtype), tmp_path / "in.onnx")
    result = pipeline.run(Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx"), Talk(quiet=True))
    (site,) = result.sites
    assert site.status == "fused", site.reason
