# SPDX-License-Identifier: Apache-2.0
"""An export that was killed after its commit is completed by whatever comes next; nothing else in the folder moves."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest
from exporter.test_save import fuse, publish, run, snapshot, write_unfused
from typer.testing import CliRunner

from flash_export import save, save_commit
from flash_export.cli import app
from flash_export.errors import UsageError
from flash_trt import onnx_file


def killed_after_commit(folder: Path, monkeypatch: pytest.MonkeyPatch, *, seed: int) -> Path:
    """An export into ``folder``/out whose process ends right after the commit; returns the output."""

    class Killed(BaseException):
        pass

    def die(_: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(save_commit, "_move_all", die)
        patch.setattr(save_commit, "_move_back", die)
        patch.setattr(save_commit, "UNDO", save_commit.MARKER)  # the marker stays as it is
        with pytest.raises(Killed):
            publish(folder, seed=seed)
    return folder / "out" / "m.flash.onnx"


def test_a_model_that_flash_trt_reads_is_completed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, seed=0)
    output = killed_after_commit(tmp_path, monkeypatch, seed=1)
    assert json.loads((output.parent / "report.json").read_text())["seed"] == 0
    onnx_file.read(save.unfused_path(output))
    assert json.loads((output.parent / "report.json").read_text())["seed"] == 1
    assert len(snapshot(output.parent)) == 3
    assert (run(output) == 1.5 * run(save.unfused_path(output))).all()


def test_a_first_export_that_was_killed_is_there_for_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = killed_after_commit(tmp_path, monkeypatch, seed=0)
    assert not output.exists()
    result = CliRunner().invoke(app, [str(output), "--dry-run", "--allow-none"])
    assert result.exit_code == 0, result.output
    assert run(output).shape == (3000,)


def test_a_model_beside_it_completes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = killed_after_commit(tmp_path, monkeypatch, seed=0)
    onnx_file.read(write_unfused(output.parent / "other.onnx"))
    assert not output.exists()


def test_a_folder_whose_process_lives_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = killed_after_commit(tmp_path, monkeypatch, seed=0)
    (hidden,) = (path for path in output.parent.iterdir() if path.is_dir())
    hidden.rename(hidden.with_name(f".{output.name}.{socket.gethostname()}-{os.getppid()}.partial"))
    save_commit.finish_interrupted(output)
    assert not output.exists()


@pytest.mark.parametrize("at", ["neither a move nor the way back", "the way back"])
def test_where_the_way_back_fails_too_the_next_run_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    publish(tmp_path, seed=0)
    before = snapshot(tmp_path / "out")
    replace = Path.replace
    moved = 0

    def failing(source: Path, target: Path) -> Path:
        nonlocal moved
        if Path(target).parent == tmp_path / "out":
            moved += 1
            if moved > (at == "the way back"):
                raise OSError(errno.EIO, "Input/output error", str(target))
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing)
        with pytest.raises(UsageError, match="Input/output error"):
            publish(tmp_path, seed=1)
    save_commit.finish_interrupted(tmp_path / "out" / "m.flash.onnx")
    assert snapshot(tmp_path / "out") == before


def hidden_by_someone(folder: Path, record: object, marker: str) -> Path:
    """A hidden folder as a killed run with process id 2 ** 22 + 1, which Linux never gives, would leave it."""
    hidden = folder / f".m.flash.onnx.{socket.gethostname()}-{2**22 + 1}.partial"
    (hidden / save_commit.OLD).mkdir(parents=True)
    (hidden / marker).write_text(record if isinstance(record, str) else json.dumps(record))
    return hidden


@pytest.mark.parametrize("marker", [save_commit.MARKER, save_commit.UNDO])
@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        "{}",
        "\xff",
        {"names": 3, "unused": 3},
        {"names": [3], "unused": [None]},
        {
            "names": ["../kept", "kept", "m.flash.onnx/../kept", "m.flash/../../kept", "m.flash.onnx"],
            "unused": ["kept", "../kept", "x/../kept.0123456789abcdef.data"],
        },
    ],
)
def test_a_record_made_by_someone_else_reaches_no_other_file(tmp_path: Path, marker: str, record: object) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    kept = [tmp_path / "kept", folder / "kept", tmp_path / "kept.0123456789abcdef.data"]
    for path in kept:
        path.write_text("mine")
    hidden = hidden_by_someone(folder, record, marker)
    for name in ("kept", "m.flash.onnx"):
        (hidden / name).write_text("theirs")
    save_commit.finish_interrupted(folder / "m.flash.onnx")
    assert [path.read_text() for path in kept] == ["mine"] * 3


def test_what_cannot_be_completed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = killed_after_commit(tmp_path, monkeypatch, seed=0)
    save.unfused_path(output).mkdir()
    with pytest.raises(UsageError, match="cannot be completed"):
        onnx_file.read(output)


def test_a_report_elsewhere_comes_with_the_export(tmp_path: Path) -> None:
    unfused, output = write_unfused(tmp_path / "u.onnx"), tmp_path / "out" / "m.flash.onnx"
    for seed in (0, 1):
        with save.staged(fuse(unfused), unfused, output) as files:
            files.publish({"seed": seed}, tmp_path / "reports", page=f"{seed}")
    assert sorted(snapshot(tmp_path / "reports")) == ["report.html", "report.json"]
    assert json.loads((tmp_path / "reports" / "report.json").read_text()) == {"seed": 1}
    assert (tmp_path / "reports" / "report.html").read_text() == "1"
    assert sorted(snapshot(tmp_path / "out")) == ["m.flash.onnx", "m.flash.unfused.onnx"]
