# SPDX-License-Identifier: Apache-2.0
"""``flash-trt triton`` on the CPU: a file on which ONNX Runtime's optimizations crash is not to end its server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from python.attention_models import HALF, fused, unfused

from flash_export import runtime_defects
from flash_export.errors import EXIT_OK
from flash_trt import triton_level

Command = Callable[..., int]

_SERVES = """
import sys, onnxruntime
path, level, library = sys.argv[1:]
settings = onnxruntime.SessionOptions()
settings.log_severity_level = 4
settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
if library:
    settings.register_custom_ops_library(library)
onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
"""
"""What the backend does with a configuration."""


def _batch_first(path: Path) -> Path:
    """A fused file in fp16 that ends with its operator library as it is, in ONNX Runtime 1.32."""
    import torch
    from exporter.torch_models import BatchFirst

    import flash_export

    x = torch.zeros(2, 7, 24).half()
    flash_export.export(BatchFirst().eval().half(), {"x": x}, dynamic_shapes={"x": {0: "batch"}}, output=path)
    return path


def _configured(folder: Path) -> tuple[int, str]:
    """The level and the library of a model in a repository."""
    text = (folder / "config.pbtxt").read_text()
    level = re.search(r"graph \{ level: (-?\d+) \}", text)
    library = re.search(r'op_library_filename: "([^"]*)"', text)
    return int(level[1]) if level else 0, library[1] if library else ""


@pytest.mark.filterwarnings("ignore")
def test_the_configuration_has_a_level_with_which_the_model_loads(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _batch_first(tmp_path / "m.onnx")
    capsys.readouterr()
    assert flash_trt("triton", tmp_path / "r", model, "--device", "cpu") == EXIT_OK
    told = " ".join(capsys.readouterr().err.split())
    level, library = _configured(tmp_path / "r" / "m")
    by_number = {number: name for name, number in triton_level.NUMBERS.items()}

    def ends_with(level: int) -> int:
        served = str(tmp_path / "r" / "m" / "1" / "model.onnx")
        command = [sys.executable, "-c", _SERVES, served, by_number[level], library]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert ends_with(level) == 0
    assert bool(level) == (ends_with(0) != 0) == ("optimization.graph.level" in told)


def test_a_model_that_the_default_loads_keeps_it_in_silence(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("triton", tmp_path / "r", fused(tmp_path / "m.onnx", dtype=HALF), "--device", "cpu") == EXIT_OK
    assert _configured(tmp_path / "r" / "m")[0] == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(("survives", "number"), [("ORT_ENABLE_EXTENDED", 1), ("ORT_ENABLE_BASIC", -1), ("", 2)])
def test_each_level_is_spelled_as_the_backend_reads_it(
    tmp_path: Path,
    flash_trt: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    survives: str,
    number: int,
) -> None:
    crashes = f"import os, sys; sys.argv[2] in ({survives!r}, 'ORT_DISABLE_ALL') or os.kill(os.getpid(), 11)"
    monkeypatch.setattr(runtime_defects, "_LOADS", crashes)
    assert flash_trt("triton", tmp_path / "r", fused(tmp_path / "m.onnx", dtype=HALF), "--device", "cpu") == EXIT_OK
    assert _configured(tmp_path / "r" / "m")[0] == number
    assert f"optimization.graph.level {number}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_model_with_nothing_fused_is_told_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    assert flash_trt("triton", tmp_path / "r", unfused(tmp_path / "m.onnx"), "--device", device) == EXIT_OK
    assert "no FlashAttention node" in " ".join(capsys.readouterr().err.split())
