# SPDX-License-Identifier: Apache-2.0
"""Opset 11 and 12 as the converters of other frameworks write them: fused, proven by the check, and right.

``paddle``: the order of operators of Paddle2ONNX for a text recogniser's blocks: one projection transposed in 5-D, its
parts by Slice and Squeeze, the scale on Q, heads of 15. ``tensorflow``: that of tf2onnx for BERT: projections in 2-D,
shapes computed in int32, K transposed at once, a padding mask of -10000.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from exporter import graphs
from exporter.torch_exports import run

from flash_export import pipeline
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.talk import Talk

HEADS, DEPTH = 3, 15
WIDTH = HEADS * DEPTH
LENGTH = 11
"""Of the graph with a mask of constant size."""

OPSETS = [11, 12]


def paddle(*, local: bool) -> str:
    """A block of a text recogniser; ``local`` adds a constant mask of minus infinity."""
    parts = "".join(
        f"{n}s = Slice (moved, at{i}, at{i + 1}, ax0)\n {n} = Squeeze <axes = [0]> ({n}s)\n"
        for i, n in enumerate("qkv")
    )
    return (
        "one = MatMul (x, w)\n shifted = Add (one, b)\n five = Reshape (shifted, apart)\n"
        f"moved = Transpose <perm = [2, 0, 3, 1, 4]> (five)\n {parts}"
        "small = Mul (q, factor)\n kt = Transpose <perm = [0, 1, 3, 2]> (k)\n scores = MatMul (small, kt)\n"
        + ("masked = Add (scores, near)\n" if local else "masked = Identity (scores)\n")
        + "p = Softmax <axis = 3> (masked)\n kept = Identity (p)\n o = MatMul (kept, v)\n"
        "back = Transpose <perm = [0, 2, 1, 3]> (o)\n out = Reshape (back, join)\n"
    )


def tensorflow() -> str:
    """An encoder's self-attention, its shapes computed as TensorFlow computes them."""
    body = "shape = Shape (x)\n shape32 = Cast <to = 6> (shape)\n"
    for name, at in (("batch", 0), ("length", 1)):
        body += f"{name}1 = Slice (shape32, at{at}, at{at + 1}, ax0)\n {name}0 = Squeeze <axes = [0]> ({name}1)\n"
        body += f"{name} = Unsqueeze <axes = [0]> ({name}0)\n"
    body += (
        "split32 = Concat <axis = 0> (batch, length, heads, depth)\n split = Cast <to = 7> (split32)\n"
        "flat = Reshape (x, rows)\n"
    )
    for name, perm in (("q", "0, 2, 1, 3"), ("k", "0, 2, 3, 1"), ("v", "0, 2, 1, 3")):
        body += f"{name}0 = MatMul (flat, w{name})\n {name}1 = Add ({name}0, b{name})\n"
        body += f"{name}4 = Reshape ({name}1, split)\n {name} = Transpose <perm = [{perm}]> ({name}4)\n"
    return body + (
        "scores = MatMul (q, k)\n scaled = Mul (scores, factor)\n"
        "wide = Unsqueeze <axes = [1, 2]> (mask)\n valid = Cast <to = 1> (wide)\n gone = Sub (unit, valid)\n"
        "bias = Mul (gone, low)\n masked = Add (scaled, bias)\n p = Softmax <axis = 3> (masked)\n o = MatMul (p, v)\n"
        "back = Transpose <perm = [0, 2, 1, 3]> (o)\n out = Reshape (back, rows)\n"
    )


def with_weights(proto: onnx.ModelProto, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model with the inputs of these names as initializers."""
    for name, array in weights.items():
        proto.graph.input.remove(next(i for i in proto.graph.input if i.name == name))
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    """Attention in float64 of ``[B, S, H*D]`` with a bias that broadcasts to the scores."""
    q, k, v = (x.reshape(*x.shape[:2], HEADS, DEPTH).transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * DEPTH**-0.5 + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ v
    return out.transpose(0, 2, 1, 3).reshape(out.shape[0], -1, WIDTH)


def fused(proto: onnx.ModelProto, folder: Path) -> bytes:
    """The file that the whole command writes, its only attention fused and proven against float64."""
    source = folder / "in.onnx"
    onnx.save(proto, source)
    output = folder / "out.onnx"
    report = pipeline.run(
        Options(source=source, output=output, report=folder, require_all=True), Talk(silent=True)
    ).report
    assert (report["fused"], report["refused"]) == (1, 0)
    check = json.loads(json.dumps(report["check"]))
    assert check["passed"] is True
    assert {r["reference"] for r in check["runs"]} == {"float64"}
    written = onnx.load(output)
    assert "Softmax" not in [n.op_type for n in written.graph.node]
    assert sum(n.domain == DOMAIN for n in written.graph.node) == 1
    return written.SerializeToString()


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("local", [False, True], ids=["global", "local"])
def test_a_packed_projection_transposed_in_5d_is_fused_and_right(local: bool, opset: int, tmp_path: Path) -> None:
    length = str(LENGTH) if local else "S"
    weights = {"w": random(WIDTH, 3 * WIDTH, seed=1) / 7, "b": random(3 * WIDTH, seed=2)}
    inputs = f"float[B, {length}, {WIDTH}] x, float[{WIDTH}, {3 * WIDTH}] w, float[{3 * WIDTH}] b"
    near = np.zeros((), np.float32)
    if local:
        distance = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH))
        near = np.where(distance < 4, 0, -np.inf).astype(np.float32)[None, None]
        weights["near"] = near
        inputs += f", float[1, 1, {LENGTH}, {LENGTH}] near"
    constants = (
        f"int64[5] apart = {{0, -1, 3, {HEADS}, {DEPTH}}}, int64[3] join = {{0, -1, {WIDTH}}}, int64[1] ax0 = {{0}}, "
        "int64[1] at0 = {0}, int64[1] at1 = {1}, int64[1] at2 = {2}, int64[1] at3 = {3}, "
        f"float[1] factor = {{{DEPTH**-0.5!r}}}"
    )
    text = {"inputs": inputs, "outputs": f"float[B, {length}, {WIDTH}] out", "constants": constants}
    proto = with_weights(graphs.model(paddle(local=local), opset=opset, **text), weights)
    file = fused(proto, tmp_path)
    for batch, rows in ((2, LENGTH), (1, LENGTH)) if local else ((2, 5), (3, 1), (1, 70)):
        x = random(batch, rows, WIDTH, seed=3)
        packed = x.astype(np.float64) @ weights["w"].astype(np.float64) + weights["b"]
        right = attend(*np.split(packed, 3, axis=-1), near.astype(np.float64))
        np.testing.assert_allclose(run(file, [x])[0], right, atol=2e-5, rtol=0)


@pytest.mark.parametrize("opset", OPSETS)
def test_projections_in_2d_with_computed_shapes_are_fused_and_right(opset: int, tmp_path: Path) -> None:
    weights = {f"w{n}": random(WIDTH, WIDTH, seed=i) / 7 for i, n in enumerate("qkv")}
    weights |= {f"b{n}": random(WIDTH, seed=3 + i) for i, n in enumerate("qkv")}
    inputs = f"float[B, S, {WIDTH}] x, int32[B, S] mask"
    inputs += "".join(f", float[{WIDTH}, {WIDTH}] w{n}, float[{WIDTH}] b{n}" for n in "qkv")
    constants = (
        f"int32[1] heads = {{{HEADS}}}, int32[1] depth = {{{DEPTH}}}, int64[2] rows = {{-1, {WIDTH}}}, "
        "int64[1] ax0 = {0}, int64[1] at0 = {0}, int64[1] at1 = {1}, int64[1] at2 = {2}, "
        f"float unit = {{1.0}}, float low = {{-10000.0}}, float factor = {{{DEPTH**-0.5!r}}}"
    )
    text = {"inputs": inputs, "outputs": f"float[N, {WIDTH}] out", "constants": constants}
    file = fused(with_weights(graphs.model(tensorflow(), opset=opset, **text), weights), tmp_path)
    for batch, rows in ((2, 5), (3, 1), (1, 70)):
        x, mask = random(batch, rows, WIDTH, seed=7), np.ones((batch, rows), np.int32)
        mask[-1, rows // 2 + 1 :] = 0
        wide = [x.astype(np.float64) @ weights[f"w{n}"].astype(np.float64) + weights[f"b{n}"] for n in "qkv"]
        right = attend(*wide, (mask[:, None, None] - 1) * 1e4)
        np.testing.assert_allclose(run(file, [x, mask])[0], right.reshape(-1, WIDTH), atol=2e-5, rtol=0)
