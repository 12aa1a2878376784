# SPDX-License-Identifier: Apache-2.0
"""An ONNX model is told by its bytes: no suffix changes anything, whatever format libraries take it for."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
from python.attention_models import HEAD_DIM, HEADS, fused, unfused

import flash_export
import flash_trt
from flash_export import cli, command
from flash_export.errors import EXIT_OK, EXIT_USAGE
from flash_trt import cpu_operator

Command = Callable[..., int]
SUFFIXES = [".json", ".textproto", ".onnxtxt", ".ort", ".model", ""]
SHAPES = f"query:1x{HEADS}x5x{HEAD_DIM}"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_model_of_any_suffix_runs_compares_is_timed_and_exported(
    tmp_path: Path, flash_trt: Command, suffix: str
) -> None:
    plain, flash = tmp_path / f"plain{suffix}", tmp_path / f"flash{suffix}"
    unfused(tmp_path / "p.onnx").rename(plain)
    fused(tmp_path / "f.onnx").rename(flash)
    for flags in ((), ("--bodies",)):
        assert flash_trt("run", flash, "--on", "cpu", "--shape", SHAPES, *flags) == EXIT_OK
    assert flash_trt("compare", flash, plain, "--shape", SHAPES, "--repeats", 1) == EXIT_OK
    assert flash_trt("bench", flash, plain, "--at", "batch=1,seq=5", "--seconds", 0.001) == EXIT_OK
    assert flash_trt("inspect", flash) == EXIT_OK
    assert cpu_operator.session(flash).get_outputs()[0].name == "output"
    output = tmp_path / "again.onnx"  # flash-export writes no other suffix
    assert command.run(cli.app, [str(plain), "-o", str(output)]) == EXIT_OK
    assert any(n.op_type == "FlashAttention" for n in ir.load(output, format="protobuf").graph)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", ["{}", '{"irVersion": "9", "graph": {}}', "\xff\xfe", ""])
def test_what_is_no_onnx_ends_with_2(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], suffix: str, content: str
) -> None:
    path = tmp_path / f"m{suffix}"
    path.write_bytes(content.encode("latin-1"))
    right = unfused(tmp_path / "right.onnx")
    commands = (("run", path), ("compare", path, right), ("compare", right, path), ("bench", path), ("build", path))
    for arguments in (*commands, ("triton", tmp_path, path)):
        assert flash_trt(*arguments) == EXIT_USAGE, arguments
        assert "  do    " in capsys.readouterr().err
    assert command.run(cli.app, [str(path)]) == EXIT_USAGE


def test_no_file_is_parsed_by_its_suffix() -> None:
    """Both libraries take a file's format from its suffix unless they are told it."""
    seen = 0
    for package in (flash_export, flash_trt):
        for path in Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("ir.load", "onnx.load", "onnx.load_model"):
                    seen += 1
                    assert "format" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"
    assert seen > 10
