# SPDX-License-Identifier: Apache-2.0
"""A sidecar is a file that anybody may have written: whatever it holds, a command ends with a word on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flash_export.errors import EXIT_MISSING, EXIT_OK, EXIT_UNSAFE, EXIT_USAGE
from flash_trt import engine_file
from flash_trt.onnx_file import GraphInput
from flash_trt.output import sidecar_path

Command = Callable[..., int]
PLAN = b"ftrt and no more"
TENSOR = {"name": "x", "dtype": 1, "dims": ["batch", 4]}
LIMITS = {"x": {"min": [1, 4], "opt": [2, 4], "max": [3, 4]}}


def _engine(folder: Path, **told: object) -> Path:
    """An engine that its sidecar vouches for, and says ``told`` of."""
    document = {
        "schema": 1,
        "engine": {"sha256": hashlib.sha256(PLAN).hexdigest()},
        "backend": {"name": "tensorrt", "version": "10"},
        "embedded_plugin": True,
        "tensors": {"inputs": [TENSOR], "outputs": [TENSOR]},
        "profile": LIMITS,
    }
    path = folder / "m.engine"
    path.write_bytes(PLAN)
    sidecar_path(path).write_text(json.dumps(document | told))
    (folder / "models").mkdir()
    return path


def test_an_honest_sidecar_tells_tensors_and_limits(tmp_path: Path, flash_trt: Command) -> None:
    path = _engine(tmp_path)
    engine = engine_file.read(path)
    assert engine.tensors == ((GraphInput("x", 1, ("batch", 4)),),) * 2
    assert engine.profiles == [LIMITS]
    assert flash_trt("triton", tmp_path / "models", path) == EXIT_OK


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 900 + "1" + "}" * 900, "[" * 50 + "]" * 50, "\x00", '"a"'])
@pytest.mark.parametrize("trust", [[], ["--trust-engine"]], ids=["as it is", "trusted"])
def test_a_sidecar_that_cannot_be_read_vouches_for_nothing(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], text: str, trust: list[str]
) -> None:
    path = _engine(tmp_path)
    sidecar_path(path).write_text(text)
    refused = {EXIT_USAGE, EXIT_MISSING} if trust else {EXIT_UNSAFE}
    assert flash_trt("triton", tmp_path / "models", path, *trust) in refused
    assert flash_trt("run", path, *trust) in refused
    assert flash_trt("bench", path, *trust) == EXIT_USAGE  # it wants an ONNX file too
    for form in ([], ["--json"]):
        assert flash_trt("inspect", path, *trust, *form) == EXIT_OK
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("told", [5, "abc", [1], {"x": 5}, {"x": {"min": [10**400], "opt": [1], "max": [1]}}, [[[]]]])
@pytest.mark.parametrize(
    "key", ["profiles", "profile", "backend", "targets", "gpu", "scratch_bytes", "attention", "plan_proof"]
)
def test_an_entry_of_another_form_is_no_crash(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], key: str, told: object
) -> None:
    path = _engine(tmp_path, **{key: told})
    assert flash_trt("inspect", path) == EXIT_OK
    assert flash_trt("triton", tmp_path / "models", path) == EXIT_OK
    assert flash_trt("run", path) in (EXIT_USAGE, EXIT_MISSING)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "tensor",
    [
        {},
        5,
        {"name": "x", "dtype": 1},
        TENSOR | {"name": 3},
        TENSOR | {"dtype": 9999},
        TENSOR | {"dtype": "float"},
        TENSOR | {"dtype": True},
        TENSOR | {"dims": 5},
        TENSOR | {"dims": [[1]]},
        TENSOR | {"dims": [2**40]},
        TENSOR | {"dims": [-2]},
    ],
)
def test_a_server_is_not_configured_by_tensors_of_another_form(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], tensor: object
) -> None:
    path = _engine(tmp_path, tensors={"inputs": [TENSOR], "outputs": [tensor]})
    assert flash_trt("triton", tmp_path / "models", path) == EXIT_USAGE
    assert "does not tell the engine's inputs and outputs" in capsys.readouterr().err
    assert not list((tmp_path / "models").iterdir())
