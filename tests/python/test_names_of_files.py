# SPDX-License-Identifier: Apache-2.0
"""Files of any name: as long as the file system takes, linked to themselves, or no text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from python.attention_models import fused, unfused

from flash_export import cli, command
from flash_export.errors import EXIT_OK, EXIT_USAGE
from flash_trt import tensor_files

Command = Callable[..., int]
LONGEST = 255


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, which is the current one, with ``m.onnx``, ``u.onnx`` and a ``loop``."""
    monkeypatch.chdir(tmp_path)
    fused(tmp_path / "m.onnx")
    unfused(tmp_path / "u.onnx")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize("length", [200, 247, LONGEST])
def test_an_output_may_have_as_long_a_name_as_there_is(files: Path, flash_trt: Command, length: int) -> None:
    path = files / f"{'n' * (length - 4)}.npz"
    assert flash_trt("run", "m.onnx", "-o", path) == EXIT_OK
    assert list(tensor_files.read(path)) == ["output"]
    page = files / f"{'n' * (length - 5)}.json"
    assert flash_trt("compare", "m.onnx", "u.onnx", "--json", page) == EXIT_OK
    assert page.stat().st_size


@pytest.mark.parametrize(
    "line",
    [
        "run m.onnx -o {}.npz",
        "build m.onnx -o {}.engine",
        "compare m.onnx u.onnx --json {}",
        "bench m.onnx --json {}",
        "triton r m.onnx --device cpu --name {}",
        "triton {} m.onnx --device cpu",
        "triton {}/r m.onnx --device cpu",
        "inspect {}",
        "run {}",
    ],
)
def test_a_longer_one_is_told_of(files: Path, flash_trt: Command, line: str) -> None:
    assert flash_trt(*line.format("n" * 300).split()) == EXIT_USAGE


@pytest.mark.parametrize(
    "line", ["inspect loop", "run loop", "compare loop u.onnx", "compare m.onnx loop", "run m.onnx -i loop",
             "compare m.onnx u.onnx --values loop", "bench loop", "triton r loop"],
)  # fmt: skip
def test_a_link_to_itself_is_no_input(files: Path, flash_trt: Command, line: str) -> None:
    assert flash_trt(*line.split()) == EXIT_USAGE


def test_a_link_to_itself_is_replaced_by_an_output_like_any_other(files: Path, flash_trt: Command) -> None:
    assert flash_trt("compare", "m.onnx", "u.onnx", "--json", "loop") == EXIT_OK
    assert not (files / "loop").is_symlink()


@pytest.mark.parametrize("command_", ["inspect", "run", "build", "bench"])
def test_a_name_that_is_no_text_is_told_of(
    files: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], command_: str
) -> None:
    path = Path(os.fsdecode(b"bad\xff.onnx"))
    (files / "m.onnx").rename(path)
    assert flash_trt(command_, path) == EXIT_USAGE
    assert "no text in this locale" in capsys.readouterr().err
    assert command.run(cli.app, [str(path)]) == EXIT_USAGE


@pytest.mark.parametrize("words", ["inspect", "run --on cpu", "build --target sm80"])
def test_a_name_that_the_output_cannot_spell_is_escaped_there(files: Path, words: str) -> None:
    (files / "nä❤.onnx").write_bytes((files / "m.onnx").read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "flash_trt", *words.split(), "nä❤.onnx"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, cwd=files, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_OK, done.stderr
    assert (rb"n\xe4\u2764" in done.stdout) is (words != "run --on cpu")
