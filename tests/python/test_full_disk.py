# SPDX-License-Identifier: Apache-2.0
"""Where no more can be written, a command ends with 5 and five parts, and what was there before is still there.

A limit of the size of files (``ulimit -f``) does to a command what a full disk does: writing ends in the middle.
"""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from python.attention_models import HALF, fused, unfused

from flash_export import command
from flash_export.errors import EXIT_MISSING, EXIT_OK, MissingHere
from flash_trt import output
from flash_trt.cli import app

PARTS = ("\n  where ", "\n  got   ", "\n  need  ", "\n  do    ")


def _limited(folder: Path, words: str, size: int) -> subprocess.CompletedProcess[str]:
    """``flash-trt WORDS`` in ``folder``, where no file may become larger than ``size`` bytes."""
    return subprocess.run(
        [sys.executable, "-B", "-m", "flash_trt", *words.split()],
        cwd=folder, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )  # fmt: skip


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("run m.onnx", 700),
        ("run m.onnx -o out.npz", 10_000),
        ("bench m.onnx u.onnx --seconds 0", 5000),
        ("compare m.onnx u.onnx", 5),
        ("compare m.onnx u.onnx --save-inputs .", 9000),
        ("build m.onnx -o out.npz --target sm80", 9000),
        ("build m.onnx -o out.npz --target sm80", 0),
        ("triton r m.onnx --device cpu", 9000),
    ],
)
def test_a_command_whose_files_get_no_room_ends_with_5_and_leaves_all_as_it_was(
    tmp_path: Path, words: str, size: int
) -> None:
    fused(tmp_path / "m.onnx", dtype=HALF)
    unfused(tmp_path / "u.onnx", dtype=HALF)
    (tmp_path / "out.npz").write_bytes(b"ftrt old")
    before = _contents(tmp_path)
    done = _limited(tmp_path, words, size)
    assert done.returncode == EXIT_MISSING, done.stderr
    assert [part for part in PARTS if part not in done.stderr] == []
    assert "Traceback" not in done.stderr
    assert _contents(tmp_path) == before
    assert _limited(tmp_path, words.replace("out.npz", "new.npz"), resource.RLIM_INFINITY).returncode == EXIT_OK


def test_an_engine_whose_sidecar_gets_no_room_is_not_written_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full between the two: an engine without its own sidecar would be refused from then on."""
    output.write_engine(tmp_path / "m.engine", b"ftrt old", {"of": "old"})
    before, synced = _contents(tmp_path), []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output.os, "fsync", fsync)
    with pytest.raises(MissingHere, match="disk is full"):
        output.write_engine(tmp_path / "m.engine", b"ftrt new", {"of": "new"})
    assert _contents(tmp_path) == before


@pytest.mark.parametrize(
    "raised",
    [
        OSError(errno.ENOSPC, "No space left on device", "/somewhere"),
        OSError(errno.EFBIG, "File too large"),
        MemoryError("Unable to allocate 9 TiB"),
    ],
    ids=lambda error: str(error),
)
def test_what_the_machine_lacks_is_told_in_five_parts_at_the_edge_too(
    raised: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def describe() -> None:
        raise raised

    monkeypatch.setattr("flash_trt.environment.describe", describe)
    assert command.run(app, ["env"]) == EXIT_MISSING
    told = capsys.readouterr().err
    assert [part for part in PARTS if part not in told] == []
    assert str(getattr(raised, "strerror", None) or raised) in told


def test_full_folders_for_temporary_files_are_told_as_such(
    tmp_path: Path, flash_trt: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    assert flash_trt("run", fused(tmp_path / "m.onnx")) == EXIT_MISSING
    told = capsys.readouterr().err
    assert [part for part in PARTS if part not in told] == []
    assert "No usable temporary directory" in told


def test_a_full_disk_under_what_a_command_says_is_told_as_such(tmp_path: Path) -> None:
    model = fused(tmp_path / "m.onnx")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "flash_trt", "inspect", str(model)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == EXIT_MISSING
    assert [part for part in PARTS if part not in done.stderr] == []
    assert "where standard output" in done.stderr
    assert "temporary files" not in done.stderr
