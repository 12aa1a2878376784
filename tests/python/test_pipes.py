# SPDX-License-Identifier: Apache-2.0
"""A named pipe, where a file is asked for, is refused: nobody may ever write to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from python.attention_models import fused, unfused

from flash_export import cli, command
from flash_export.errors import EXIT_UNSAFE, EXIT_USAGE

pytestmark = pytest.mark.timeout(60)  # what opens the pipe waits without end

Command = Callable[..., int]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, which is the current one, with ``m.onnx``, ``u.onnx`` and the ``pipe``."""
    monkeypatch.chdir(tmp_path)
    fused(tmp_path / "m.onnx")
    unfused(tmp_path / "u.onnx")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "build pipe",
        "build m.onnx --timing-cache pipe",
        "run pipe",
        "run m.onnx -i pipe",
        "run m.onnx -o pipe",
        "compare pipe u.onnx",
        "compare m.onnx pipe",
        "compare m.onnx u.onnx --values pipe",
        "bench pipe",
        "bench m.onnx pipe",
        "triton repository pipe",
        "inspect pipe",
    ],
)
def test_no_command_of_flash_trt_waits_for_a_pipe(
    files: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (files / "repository").mkdir()
    assert flash_trt(*line.split()) == EXIT_USAGE
    assert "pipe" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["pipe", "u.onnx --values pipe"])
def test_flash_export_does_not_either(files: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert command.run(cli.app, line.split()) == EXIT_USAGE
    assert "not a regular file" in capsys.readouterr().err


def test_a_sidecar_that_is_a_pipe_vouches_for_nothing(files: Path, flash_trt: Command) -> None:
    (files / "x.engine").write_bytes(b"ftrt and no more")
    os.mkfifo(files / "x.engine.json")
    (files / "repository").mkdir()
    assert flash_trt("triton", "repository", "x.engine") == EXIT_UNSAFE
