# SPDX-License-Identifier: Apache-2.0
"""What a source is, is told by its content; what cannot be read is a usage error that says what was found."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import pytest
import safetensors.torch
import torch
from exporter.torch_models import Block, save_program

from flash_export import load
from flash_export.errors import MissingHere, UsageError
from flash_export.options import InputSpec, Options
from flash_trt import file_kinds


def small_onnx(path: Path) -> Path:
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [value("x", onnx.TensorProto.FLOAT, [2, "n"])],
        [value("y", onnx.TensorProto.FLOAT, [2, "n"])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def torchscript(path: Path) -> Path:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(3, 5), torch.zeros(2, 3)), path)
    return path


def torch_package(path: Path) -> Path:
    with torch.package.PackageExporter(path) as package:
        package.save_pickle("model", "model.pkl", {"a": torch.ones(3)})
    return path


def legacy_state_dict(path: Path) -> Path:
    torch.save(Block().state_dict(), path, _use_new_zipfile_serialization=False)
    return path


def test_a_kind_is_told_by_content_whatever_the_suffix(tmp_path: Path) -> None:
    save_program(tmp_path / "a.pt2")
    (tmp_path / "a.pt2").rename(tmp_path / "program.onnx")
    torch.save(Block().state_dict(), tmp_path / "weights.safetensors")
    safetensors.torch.save_file(Block().state_dict(), tmp_path / "tensors.pt")
    kinds = {
        "program.onnx": "exported_program",
        "weights.safetensors": "torch_zip",
        "tensors.pt": "safetensors",
        small_onnx(tmp_path / "graph.pt2").name: "onnx",
        torchscript(tmp_path / "script.bin").name: "torchscript",
        torch_package(tmp_path / "package.pt").name: "torch_package",
        legacy_state_dict(tmp_path / "old.pth").name: "legacy_pickle",
    }
    assert {name: load.file_kind(tmp_path / name) for name in kinds} == kinds


@pytest.mark.parametrize(
    ("name", "content", "got"),
    [
        ("missing.pt", None, "No such file"),
        ("empty.pt", b"", "an empty file"),
        ("text.pt", b"these are no weights\n", "begins with 'these are no weights"),
        ("requirements.pt", b"requests==2.0\ntorch\n", "begins with 'requests==2.0"),
        ("cut.pt", b"PK\x03\x04 and no more", "a zip archive that is broken"),
    ],
)
def test_an_unreadable_source_is_a_usage_error(tmp_path: Path, name: str, content: bytes | None, got: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        load.load(Options(source=path))
    assert got in error.value.got
    assert error.value.where == str(path)


def engine(path: Path) -> None:
    path.write_bytes(b"vtrt\0\0\0\0\2\0\0\0")


@pytest.mark.parametrize(
    ("write", "got", "do"),
    [
        (engine, "a TensorRT engine", "the model that the engine was built from; flash-trt run"),
        (lambda path: np.savez(path.open("wb"), x=np.ones(3)), "NumPy arrays", "--values"),
        (lambda path: np.save(path.open("wb"), np.ones(3)), "a NumPy array", "--values"),
        (lambda path: path.write_text('\n{"schema": 1}'), "JSON", "the model that it describes"),
    ],
    ids=["engine", "npz", "npy", "json"],
)
def test_a_file_of_another_kind_is_named_with_what_it_is_for(
    write: Callable[[Path], object], got: str, do: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.onnx")
    with pytest.raises(UsageError, match="cannot be read") as error:
        load.load(Options(source=tmp_path / "model.onnx"))
    assert error.value.got.startswith(got)
    assert do in error.value.do


def test_both_commands_know_the_same_engines() -> None:
    assert load.PLAN_MAGIC == file_kinds.PLAN_MAGIC


def test_a_truncated_archive_is_a_usage_error(tmp_path: Path) -> None:
    torch.save(Block().state_dict(), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cannot be read"):
        load.load(Options(source=tmp_path / "half.pt"))


def test_a_zip_without_a_model_is_a_usage_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("readme.txt", "nothing here")
    with pytest.raises(UsageError) as error:
        load.load(Options(source=tmp_path / "a.pt"))
    assert "no model among them" in error.value.got


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Hugging Face model"):
        load.load(Options(source=tmp_path))


@pytest.mark.parametrize(
    "flags", [{"model": "a.b:c"}, {"inputs": (InputSpec("x", "float32", (2,)),)}, {"dtype": "fp16"}, {"opset": 20}]
)
def test_flags_of_a_module_do_not_go_with_an_onnx_file(tmp_path: Path, flags: dict) -> None:
    with pytest.raises(UsageError, match="does not go with an ONNX file"):
        load.load(Options(source=small_onnx(tmp_path / "a.onnx"), **flags))


def test_a_torch_that_is_too_old_to_be_safe_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(MissingHere, match="too old"):
        load.require_torch()
