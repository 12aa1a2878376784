# SPDX-License-Identifier: Apache-2.0
"""A flag that makes no sense is a usage error that says what does, in every command: never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from python.attention_models import fused, unfused

from flash_export.errors import EXIT_OK, EXIT_USAGE
from flash_trt import cli
from flash_trt.build import BuildOptions

DIGITS = "9" * 5000
"""More than Python turns into a number."""


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "."),
        ("build", ""),
        ("build", "/"),
        ("build", "f.onnx", "-o", ""),
        ("build", "f.onnx", "-o", "."),
        ("run", ""),
        ("run", "f.onnx", "-o", ""),
        ("run", "f.onnx", "--seed", "-1"),
        ("compare", "f.onnx", "u.onnx", "--seed", "-5"),
        ("compare", "f.onnx", "u.onnx", "--json", ""),
        ("bench", "f.onnx", "--json", "."),
        ("triton", ".", ""),
        ("inspect", ""),
        ("run", "f.onnx", "--shape", f"x:1x{DIGITS}x64"),
        ("build", "f.onnx", "--shape", f"x:1x{DIGITS}x64"),
        ("compare", "f.onnx", "u.onnx", "--shape", f"x:1x{DIGITS}x64"),
        ("bench", "f.onnx", "--at", f"batch={DIGITS}"),
        ("bench", "f.onnx", "--at", "batch=²"),
    ],
    ids=lambda arguments: " ".join(word[:20] or "nothing" for word in arguments),
)
def test_a_flag_that_makes_no_sense_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_trt: Callable[..., int], arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    fused(tmp_path / "f.onnx")
    unfused(tmp_path / "u.onnx")
    before = sorted(tmp_path.iterdir())
    assert flash_trt(*arguments) == EXIT_USAGE
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert DIGITS not in told
    assert sorted(tmp_path.iterdir()) == before


def test_a_target_named_twice_is_built_for_once(monkeypatch: pytest.MonkeyPatch, flash_trt: Callable[..., int]) -> None:
    asked: list[BuildOptions] = []

    def noted(options: BuildOptions, _: object) -> None:
        asked.append(options)
        raise SystemExit(0)

    monkeypatch.setattr(cli, "build_step", noted)
    with pytest.raises(SystemExit):
        flash_trt("build", "m.onnx", "--target", "sm89,SM89", "--target", "sm80,sm89")
    assert asked[0].targets == ("sm89", "sm80")


@pytest.mark.parametrize("words", ["", *(info.callback.__name__ for info in cli.app.registered_commands)])
def test_the_help_shows_flags_without_a_value(
    flash_trt: Callable[..., int], capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert flash_trt(*words.split(), "--help") == EXIT_OK
    said = capsys.readouterr().out
    assert "--help" in said
    assert "<bool>" not in said


@pytest.mark.parametrize("name", ["build", "run", "compare", "bench", "triton", "inspect", "env"])
def test_the_help_of_each_command_shows_a_line_that_it_takes(
    flash_trt: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert flash_trt(name, "--help") == EXIT_OK
    _, _, example = " ".join(capsys.readouterr().out.split()).partition("Example ")
    words = example.split()
    assert words[:2] == ["flash-trt", name]
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    group.commands[name].make_context(name, words[2:])  # refuses a flag that is none, or a value that is none
