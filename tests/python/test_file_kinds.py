# SPDX-License-Identifier: Apache-2.0
"""A file of another kind is named as what it is: where a model or an engine is read, and where an engine goes."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from python.attention_models import fused, unfused

import flash_trt
from flash_export.errors import EXIT_OK, EXIT_USAGE, UsageError
from flash_trt.backends import Backend
from flash_trt.file_kinds import Kind, kind_of

Command = Callable[..., int]


ZIPS = {
    "pickle in a zip": "net/data.pkl",
    "TorchScript": "net/data/0",
    "pt2": "net/archive_format",
    "weights of a pt2": "net/data/weights/weight_0",
    "zip": "words.txt",
    "zip of a folder": "folder/model.onnx",
}


def _write(folder: Path, kind: str) -> Path:
    """A file of this kind, as its own program begins it, whose name does not tell."""
    path = folder / "other.file"
    if kind in ZIPS:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(ZIPS[kind], b"pt2")
    elif kind == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "arrays":
        with path.open("wb") as file:
            np.savez(file, x=np.zeros(3))
    elif kind == "safetensors":
        header = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    elif kind == "onnx":
        unfused(path)
    else:
        path.write_bytes(
            {"engine": b"vtrt and more", "pickle": b"\x80\x04K\x01.", "text": b"words", "empty": b""}[kind]
        )
    return path


KINDS: dict[str, tuple[Kind, str]] = {
    "pickle in a zip": ("pytorch", "run flash-export on it first"),
    "TorchScript": ("pytorch", "run flash-export on it first"),
    "pt2": ("pytorch", "run flash-export on it first"),
    "weights of a pt2": ("pytorch", "run flash-export on it first"),
    "zip": ("zip", "unpack it first"),
    "zip of a folder": ("zip", "unpack it first"),
    "array": ("array", "numpy.savez"),
    "pickle": ("pytorch", "run flash-export on it first"),
    "safetensors": ("safetensors", "run flash-export on the model's folder first"),
    "arrays": ("arrays", "--inputs"),
    "engine": ("engine", "flash_trt.open_engine"),
}


@pytest.mark.parametrize("kind", [*KINDS, "onnx", "text", "empty"])
def test_the_kind_is_told_by_the_first_bytes(tmp_path: Path, kind: str) -> None:
    assert kind_of(_write(tmp_path, kind)) == (KINDS[kind][0] if kind in KINDS else "")


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_where_a_model_is_read_is_named_with_what_helps(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = _write(tmp_path, kind)
    for name in ("build",) if kind == "engine" else ("build", "run", "inspect"):
        assert flash_trt(name, path) == EXIT_USAGE
        said = " ".join(capsys.readouterr().err.split())
        assert "this is no ONNX model" in said
        assert KINDS[kind][1] in said
    with pytest.raises(UsageError) as caught:
        _session(path)
    assert KINDS[kind][1] in caught.value.do


@pytest.mark.parametrize("content", [b"", b"f"])
def test_an_empty_or_cut_engine_is_no_broken_model(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "m.engine"
    path.write_bytes(content)
    for name in ("run", "inspect", "bench"):
        assert flash_trt(name, path) == EXIT_USAGE
        said = " ".join(capsys.readouterr().err.split())
        assert "the engine cannot be read" in said
        assert f"a file of {len(content)} bytes" in said


def _session(path: Path) -> object:
    return flash_trt.session(path)


@pytest.mark.parametrize("open_it", [flash_trt.open_engine, flash_trt.why_not_here])
@pytest.mark.parametrize("kind", ["onnx", "zip", "text"])
def test_another_kind_where_an_engine_is_read_is_named(
    tmp_path: Path, kind: str, open_it: Callable[[Path], object]
) -> None:
    with pytest.raises(UsageError) as caught:
        open_it(_write(tmp_path, kind))
    assert caught.value.what == "this is no TensorRT engine"
    assert "flash_trt.session" in caught.value.do


@pytest.mark.parametrize("kind", ["onnx", "zip", "safetensors", "text"])
def test_an_engine_replaces_no_file_of_another_kind(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    other = _write(tmp_path, kind)
    before = other.read_bytes()
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "-o", other, "--target", "sm80") == EXIT_USAGE
    assert f"do give -o {tmp_path / 'other.engine'}" in " ".join(capsys.readouterr().err.split())
    assert other.read_bytes() == before
    assert not (tmp_path / "other.file.json").exists()


@pytest.mark.parametrize("suffix", [".onnx", ".PT", ".pth", ".pt2", ".safetensors"])
def test_an_engine_gets_no_name_of_a_model(tmp_path: Path, flash_trt: Command, suffix: str) -> None:
    output = tmp_path / f"new{suffix}"
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "-o", output, "--target", "sm80") == EXIT_USAGE
    assert not output.exists()


@pytest.mark.parametrize("kind", ["engine", "empty"])
def test_an_engine_replaces_an_older_one_and_an_empty_file(
    rtx: Backend, tmp_path: Path, flash_trt: Command, kind: str
) -> None:
    other = _write(tmp_path, kind)
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "-o", other, "--target", "sm80") == EXIT_OK
    assert kind_of(other) == "engine"
    assert other.stat().st_size > 100


@pytest.mark.parametrize("content", ["words", '{"schema": 1}', "[1]", "[" * 100_000])
def test_a_sidecar_replaces_no_file_of_the_users(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "m.engine.json").write_text(content)
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "-o", tmp_path / "m.engine", "--target", "sm80") == EXIT_USAGE
    assert "sidecar would replace a file of yours" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "m.engine.json").read_text() == content
    assert not (tmp_path / "m.engine").exists()


@pytest.mark.parametrize("content", ["", '{"schema": 0, "engine": {}, "more": 1}'])
def test_a_sidecar_replaces_an_older_one_whose_engine_is_gone(
    rtx: Backend, tmp_path: Path, flash_trt: Command, content: str
) -> None:
    (tmp_path / "m.engine.json").write_text(content)
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "-o", tmp_path / "m.engine", "--target", "sm80") == EXIT_OK
    assert json.loads((tmp_path / "m.engine.json").read_text())["engine"]["file"] == "m.engine"
