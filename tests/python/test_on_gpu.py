# SPDX-License-Identifier: Apache-2.0
"""On a machine with a GPU an engine is built for it, runs with and without a graph, agrees, is timed and inspected.

Its twin without one is test_engine_session.py, where only CUDA and TensorRT's context are stand-ins.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from contract.reference import attention
from python.attention_models import HALF, HEAD_DIM, HEADS, SCALE, fused, unfused

from flash_export.errors import EXIT_OK
from flash_trt import backends, gpu, open_engine
from flash_trt.backends import BackendName

Command = Callable[..., int]
pytestmark = pytest.mark.gpu
SHAPE = f"query:1x{HEADS}x1x{HEAD_DIM},2x{HEADS}x131x{HEAD_DIM},4x{HEADS}x300x{HEAD_DIM}"


@pytest.fixture
def backend() -> BackendName:
    """A TensorRT that is installed here and builds for the GPU here."""
    if backends.is_installed("tensorrt"):
        return "tensorrt"
    here = gpu.devices()[0].sm
    if here not in backends.load("tensorrt-rtx").targets:
        pytest.skip(f"TensorRT for RTX does not build for {here}, and TensorRT is not installed")
    return "tensorrt-rtx"


@pytest.fixture
def engine(backend: BackendName, tmp_path: Path, flash_trt: Command) -> Path:
    """A causal attention in fp16, m.engine, beside its m.onnx and u.onnx."""
    unfused(tmp_path / "u.onnx", dtype=HALF)
    model, path = fused(tmp_path / "m.onnx", dtype=HALF), tmp_path / "m.engine"
    assert flash_trt("build", model, "-o", path, "--backend", backend, "--shape", SHAPE) == EXIT_OK
    return path


@pytest.mark.parametrize("flags", [(), ("--cuda-graph",)], ids=["plain", "graph"])
def test_an_engine_computes_attention_on_the_gpu(
    engine: Path, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal((2, HEADS, 97, HEAD_DIM)).astype(np.float16) for n in ("query", "key", "value")}
    np.savez(tmp_path / "in.npz", **given)
    assert flash_trt("run", engine, "-i", tmp_path / "in.npz", "-o", tmp_path / "out.npz", *flags) == EXIT_OK
    assert "the TensorRT plugin, in the engine" in capsys.readouterr().out
    expected, _ = attention(*(array.astype(np.float64) for array in given.values()), scale=SCALE, causal=1)
    with np.load(tmp_path / "out.npz") as written:
        rounding = float(np.finfo(np.float16).eps) * np.abs(expected).max()
        np.testing.assert_allclose(written["output"].astype(np.float64), expected, rtol=0, atol=2 * rounding)


def test_an_engine_agrees_with_the_unfused_model(engine: Path, tmp_path: Path, flash_trt: Command) -> None:
    assert flash_trt("compare", engine, tmp_path / "u.onnx", "--html", tmp_path / "v.html") == EXIT_OK


def test_an_engine_is_timed_with_and_without_a_graph(engine: Path, tmp_path: Path, flash_trt: Command) -> None:
    flags = ("--at", "batch=2,seq=131", "--cuda-graph", "--seconds", 0.2, "--json", tmp_path / "b.json")
    assert flash_trt("bench", engine, tmp_path / "m.onnx", *flags) == EXIT_OK
    plain, graph, *_ = json.loads((tmp_path / "b.json").read_text())["settings"][0]["timings"]
    for timing in (plain, graph):
        assert 0 < timing["p10_ms"] <= timing["p50_ms"] <= timing["p99_ms"]


def test_the_engine_inspector_is_asked(engine: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert flash_trt("inspect", engine, "--json") == EXIT_OK
    told = json.loads(capsys.readouterr().out)["inspector"]
    assert told["why"] is None
    assert told["layers"]


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
def test_an_engine_with_two_profiles_runs_shapes_of_each_in_turn(
    backend: BackendName, tmp_path: Path, flash_trt: Command, graph: bool
) -> None:
    """Neither profile holds the other's shapes, so a wrong one is refused by TensorRT."""
    unfused(tmp_path / "u.onnx", dtype=HALF)
    model, path = fused(tmp_path / "m.onnx", dtype=HALF), tmp_path / "m.engine"
    shapes = [f"query:{b}x{HEADS}x{s}x{HEAD_DIM}" for b, s in ((8, 1), (2, 131))]
    flags = [word for shape in shapes for word in ("--shape", shape)]
    assert flash_trt("build", model, "-o", path, "--backend", backend, *flags) == EXIT_OK
    session = open_engine(path, cuda_graph=graph)
    rng = np.random.default_rng(0)
    for batch, length in ((2, 131), (8, 1), (8, 1), (2, 131)):
        shape = (batch, HEADS, length, HEAD_DIM)
        given = {name: rng.standard_normal(shape).astype(np.float16) for name in ("query", "key", "value")}
        expected, _ = attention(*(array.astype(np.float64) for array in given.values()), scale=SCALE, causal=1)
        rounding = float(np.finfo(np.float16).eps) * np.abs(expected).max()
        np.testing.assert_allclose(session.run(given)["output"], expected, rtol=0, atol=2 * rounding)
    session.close()
    assert flash_trt("compare", path, tmp_path / "u.onnx") == EXIT_OK
