# SPDX-License-Identifier: Apache-2.0
"""``flash-trt run --on cuda``: the bodies compute there, that is said, and the CPU is never taken instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnxruntime
import pytest
from contract.reference import attention
from python.attention_models import HEAD_DIM, HEADS, SCALE, fused

from flash_export.errors import EXIT_MISSING, EXIT_OK
from flash_trt import gpu, ort, tensor_files

Command = Callable[..., int]
NAMES = ("query", "key", "value")


def _inputs(path: Path) -> Path:
    rng = np.random.default_rng(5)
    shape = (2, HEADS, 37, HEAD_DIM)
    tensor_files.write(path, {name: rng.standard_normal(shape).astype(np.float32) for name in NAMES})
    return path


class OnCuda(onnxruntime.InferenceSession):
    """A session that was made on CUDA, as far as its caller can tell; this machine's CPU computes."""

    asked: ClassVar[list[list[str]]] = []

    def __init__(
        self, path: str, options: onnxruntime.SessionOptions, providers: list[str], **others: list[str]
    ) -> None:
        self.asked.append(providers)
        super().__init__(path, options, providers=["CPUExecutionProvider"], **others)

    def get_providers(self) -> list[str]:
        return self.asked[-1]


@pytest.fixture
def cuda_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and an ONNX Runtime that says that it has its CUDA provider."""
    monkeypatch.setattr(gpu, "devices", lambda: [gpu.Device("a GPU", "sm90", 2**34)])
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)


@pytest.mark.parametrize("flags", [("--on", "cuda"), ()], ids=["asked for", "auto"])
def test_on_cuda_the_bodies_compute_and_that_is_said(
    cuda_here: None,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", OnCuda)
    monkeypatch.setattr(OnCuda, "asked", [])
    given = _inputs(tmp_path / "in.npz")
    assert (
        flash_trt("run", fused(tmp_path / "m.onnx"), "--inputs", given, "-o", tmp_path / "out.npz", *flags) == EXIT_OK
    )
    assert OnCuda.asked == [["CUDAExecutionProvider", "CPUExecutionProvider"]]
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == f"attention computed by: {ort.BODIES}, on CUDA"
    assert "on CUDA" in told.err
    arrays = tensor_files.read(given)
    expected, _ = attention(*(arrays[name].astype(np.float64) for name in NAMES), scale=SCALE, causal=1)
    np.testing.assert_allclose(tensor_files.read(tmp_path / "out.npz")["output"], expected, atol=1e-5)


def test_on_the_cpu_stays_there_though_cuda_is_here(
    cuda_here: None, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("run", fused(tmp_path / "m.onnx"), "--on", "cpu") == EXIT_OK
    assert capsys.readouterr().out.splitlines()[-1] == f"attention computed by: {ort.LIBRARY}"


def test_a_cuda_provider_that_does_not_load_is_told_and_the_cpu_is_not_taken(
    cuda_here: None, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime warns and makes a session on the CPU: here since it really has no such provider."""
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        assert flash_trt("run", fused(tmp_path / "m.onnx"), "--on", "cuda") == EXIT_MISSING
    assert "got   a session on CPUExecutionProvider" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_cuda_computes_attention(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    if not ort.has_cuda():
        pytest.skip("no NVIDIA driver here that ONNX Runtime has a CUDA provider for: pip install 'DIR[gpu]'")
    given = _inputs(tmp_path / "in.npz")
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("run", model, "--inputs", given, "-o", tmp_path / "out.npz", "--on", "cuda") == EXIT_OK
    assert f"{ort.BODIES}, on CUDA" in capsys.readouterr().out
    arrays = tensor_files.read(given)
    expected, _ = attention(*(arrays[name].astype(np.float64) for name in NAMES), scale=SCALE, causal=1)
    np.testing.assert_allclose(tensor_files.read(tmp_path / "out.npz")["output"], expected, atol=5e-3)
