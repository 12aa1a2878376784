# SPDX-License-Identifier: Apache-2.0
"""A file that is written appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from python.attention_models import fused, unfused

from flash_export import interrupt
from flash_export.errors import EXIT_OK, EXIT_USAGE, MissingHere, UsageError
from flash_trt import output
from flash_trt.output import sidecar_path, write_atomically, write_engine


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("command", "flags"), [("compare", ("--json", "--html")), ("bench", ("--json", "--plot"))], ids=["compare", "bench"]
)
def test_two_outputs_of_one_name_are_refused_before_anything_runs(
    command: str, flags: tuple[str, str], tmp_path: Path, flash_trt: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    models = fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")
    (tmp_path / "deep").mkdir()
    same = tmp_path / "deep" / ".." / "out"
    assert flash_trt(command, *models, flags[0], tmp_path / "out", flags[1], same) == EXIT_USAGE
    assert "two outputs would be one file" in capsys.readouterr().err
    assert not same.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(_: int) -> None:
        raise OSError(code, "full")

    path = tmp_path / "engine"
    path.write_bytes(b"old")
    monkeypatch.setattr(output.os, "fsync", full)
    with pytest.raises(MissingHere, match="disk is full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "m.onnx", "-o", "m.onnx", "--target", "sm80"),
        ("compare", "m.onnx", "other.onnx", "--json", "m.onnx"),
        ("compare", "m.onnx", "other.onnx", "--json", "other.onnx"),
        ("bench", "m.onnx", "--json", "m.onnx"),
        ("bench", "m.onnx", "--plot", "m.onnx"),
        ("run", "m.onnx", "-i", "in.npz", "-o", "in.npz"),
    ],
    ids=" ".join,
)
def test_no_command_replaces_a_file_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_trt: Callable[..., int], arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    fused(tmp_path / "m.onnx")
    fused(tmp_path / "other.onnx")
    np.savez(tmp_path / "in.npz", x=np.zeros(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert flash_trt(*arguments) == EXIT_USAGE
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "m.onnx", "-o", "w.json", "--target", "sm80"),
        ("build", "m.onnx", "-o", "w", "--target", "sm80"),  # its sidecar would be w.json
        ("run", "m.onnx", "-o", "w.json"),
        ("compare", "m.onnx", "other.onnx", "--json", "w.json"),
        ("compare", "other.onnx", "m.onnx", "--html", "w.json"),
        ("bench", "m.onnx", "other.onnx", "--json", "w.json"),
        ("bench", "other.onnx", "m.onnx", "--plot", "w.json"),
    ],
    ids=" ".join,
)
def test_no_command_replaces_the_weights_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_trt: Callable[..., int], arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    unfused(tmp_path / "other.onnx")
    model = onnx.load(fused(tmp_path / "m.onnx"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "weight"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.json", size_threshold=0)
    before = (tmp_path / "w.json").read_bytes()
    assert flash_trt(*arguments) == EXIT_USAGE
    assert (tmp_path / "w.json").read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "m.engine", "-i", "in.npz", "-o", "m.engine.json", "--trust-engine"),
        ("compare", "m.engine", "other.onnx", "--json", "m.engine.json", "--trust-engine"),
        ("bench", "m.engine", "other.onnx", "--json", "m.engine.json", "--trust-engine"),
    ],
    ids=" ".join,
)
def test_no_command_replaces_the_sidecar_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_trt: Callable[..., int], arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    unfused(tmp_path / "other.onnx")
    np.savez(tmp_path / "in.npz", x=np.zeros(1))
    (tmp_path / "m.engine").write_bytes(b"ftrt")
    (tmp_path / "m.engine.json").write_text("{}")
    assert flash_trt(*arguments) == EXIT_USAGE
    assert "would replace the source" in capsys.readouterr().err
    assert (tmp_path / "m.engine.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [
        ("FLASH_TRT_PLUGIN", ("build", "m.onnx", "-o", "lib.npz", "--target", "sm80")),
        ("FLASH_TRT_PLUGIN", ("build", "m.onnx", "--timing-cache", "lib.npz", "--target", "sm80")),
        ("FLASH_TRT_CPU_OPERATOR", ("run", "m.onnx", "-o", "lib.npz")),
        ("FLASH_TRT_CPU_OPERATOR", ("bench", "m.onnx", "--seconds", "0", "--json", "lib.npz")),
        ("FLASH_TRT_CPU_OPERATOR", ("compare", "m.onnx", "other.onnx", "--html", "lib.npz")),
    ],
    ids=str,
)
def test_no_command_replaces_a_library_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_trt: Callable[..., int], variable: str,
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    fused(tmp_path / "m.onnx")
    unfused(tmp_path / "other.onnx")
    Path("lib.npz").write_bytes(b"a library")
    monkeypatch.setenv(variable, str(tmp_path / "lib.npz"))
    assert flash_trt(*arguments) == EXIT_USAGE
    assert "would replace the source" in capsys.readouterr().err
    assert Path("lib.npz").read_bytes() == b"a library"


def test_no_command_replaces_an_installed_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_trt: Callable[..., int]
) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("libflash_attention_plugin.so", "libflash_attention_cpu.so"):
        library = tmp_path / "lib" / name
        library.write_bytes(b"a library")
        monkeypatch.setattr("flash_trt.native.folders", lambda: [tmp_path / "lib"])
        assert flash_trt("build", fused(tmp_path / "m.onnx"), "-o", library, "--target", "sm80") == EXIT_USAGE
        assert library.read_bytes() == b"a library"


def test_an_output_that_cannot_be_created_is_told_without_another_flag(
    tmp_path: Path, flash_trt: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    models = fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")
    assert flash_trt("compare", *models, "--json", tmp_path) == EXIT_USAGE
    assert "do    give the output another path" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--values", "r/inputs-03.npz", "--json", "r/inputs-03.npz"),
        ("--values", "r/inputs-03.npz", "--html", "r/inputs-03.npz"),
        ("--values", "r/inputs-03.npz", "--save-inputs", "r"),
        ("--json", "r/inputs-00.npz", "--save-inputs", "r"),
        ("--html", "r/inputs-05.npz", "--save-inputs", "r"),
    ],
    ids=" ".join,
)
def test_no_comparison_replaces_inputs_that_it_reads_or_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_trt: Callable[..., int], flags: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    models = fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")
    assert flash_trt("compare", *models, "--save-inputs", "r") == EXIT_OK
    before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    assert "inputs-05.npz" in before
    assert flash_trt("compare", *models, *flags) == EXIT_USAGE
    assert {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before


def test_engines_written_to_one_place_at_once_leave_a_sidecar_of_the_engine_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "m.engine", Path.replace
    plans = [b"one" * 1000, b"two" * 1000]
    engines: list[Path] = []

    def replace_slowly(self: Path, target: Path) -> Path:
        if target == path:
            engines.append(self)
            mine.late = len(engines) == 1
        elif mine.late:
            time.sleep(0.5)  # without a lock the other writes both of its files now
        return replace(self, target)

    mine = threading.local()
    monkeypatch.setattr(Path, "replace", replace_slowly)
    barrier = threading.Barrier(2)

    def write(plan: bytes) -> None:
        barrier.wait()
        write_engine(path, plan, {"engine": {"sha256": hashlib.sha256(plan).hexdigest()}})

    writers = [threading.Thread(target=write, args=(plan,)) for plan in plans]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    told = json.loads(sidecar_path(path).read_text())["engine"]["sha256"]
    assert told == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sorted(tmp_path.iterdir()) == [path, sidecar_path(path)]


GONE = "the output cannot be written"


def _parts_of(told: str) -> list[str]:
    return [part for part in ("\n  where ", "\n  got   ", "\n  need  ", "\n  do    ") if part in told]


@pytest.mark.parametrize("command", ["run", "compare", "build"])
def test_a_folder_that_takes_no_file_is_refused_before_anything_runs(
    tmp_path: Path, flash_trt: Callable[..., int], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """/proc has every right for root, and takes no file."""
    arguments = {
        "run": ("run", fused(tmp_path / "f.onnx"), "-o", "/proc/x.npz"),
        "build": ("build", tmp_path / "f.onnx", "-o", "/proc/x.engine"),
        "compare": ("compare", tmp_path / "f.onnx", unfused(tmp_path / "u.onnx"), "--json", "/proc/x.json"),
    }
    assert flash_trt(*arguments[command]) == EXIT_USAGE
    out, told = capsys.readouterr()
    assert len(_parts_of(told)) == 4
    assert "/proc" in told
    assert out == ""


def test_a_folder_that_goes_while_a_command_works_is_told_of(
    tmp_path: Path, flash_trt: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, check = tmp_path / "there", output.check_output

    def checked(path: Path) -> None:
        check(path)
        monkeypatch.setattr(output.interrupt, "temporary_file", _removing(folder))

    monkeypatch.setattr(output, "check_output", checked)
    model = fused(tmp_path / "f.onnx")
    assert flash_trt("run", model, "-o", folder / "x.npz") == EXIT_USAGE
    told = capsys.readouterr().err
    assert GONE in told
    assert len(_parts_of(told)) == 4


def _removing(folder: Path) -> Callable[[Path], contextlib.AbstractContextManager[Path]]:
    """``temporary_file`` of a folder that is removed after its first."""
    made = interrupt.temporary_file

    @contextlib.contextmanager
    def temporary_file(parent: Path) -> Iterator[Path]:
        with made(parent) as path:
            yield path
        shutil.rmtree(folder)

    return temporary_file


@pytest.mark.parametrize("write", [write_atomically, lambda path, data: write_engine(path, data, {})])
def test_a_folder_that_is_gone_is_a_usage_error(tmp_path: Path, write: Callable[[Path, bytes], None]) -> None:
    with pytest.raises(UsageError, match=GONE):
        write(tmp_path / "gone" / "x", b"ftrt")


def test_a_file_of_the_users_beside_an_older_engine_is_kept(tmp_path: Path) -> None:
    write_engine(engine := tmp_path / "m.engine", b"ftrt old", {"schema": 1, "engine": {}})
    output.check_engine(engine)
    sidecar_path(engine).write_text('{"mine": 1}')
    with pytest.raises(UsageError, match="sidecar would replace a file of yours"):
        output.check_engine(engine)
