# SPDX-License-Identifier: Apache-2.0
"""Several models in one folder: ``report.json`` is that of the last export, and none of the others is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exporter import small_models
from exporter.test_save import fuse, write_unfused

import flash_export
from flash_export.load import _files_of_folder
from flash_export.save import staged
from flash_export.save_report import keep_others, replaced


def publish(output: Path, note: str = "", *, folder: Path | None = None) -> None:
    unfused = write_unfused(output.parent.parent / "unfused.onnx")
    with staged(fuse(unfused), unfused, output) as files:
        files.publish({"output": str(output), "note": note}, folder, page=f"{output.name} {note}")


def reports(folder: Path) -> dict[str, str]:
    """Name of each report and page -> the model that it is of, and its note."""
    pages = {p.name: p.read_text().strip() for p in folder.glob("*report.html")}
    for path in folder.glob("*report.json"):
        content = json.loads(path.read_text())
        pages[path.name] = f"{Path(content['output']).name} {content['note']}".strip()
    return pages


@pytest.mark.parametrize("apart", [False, True])
def test_the_report_of_another_model_is_kept_under_its_name(tmp_path: Path, apart: bool) -> None:
    models, place = tmp_path / "models", tmp_path / ("reports" if apart else "models")
    folder = place if apart else None
    publish(models / "a.onnx", "1", folder=folder)
    assert reports(place) == {"report.json": "a.onnx 1", "report.html": "a.onnx 1"}
    publish(models / "b.onnx", folder=folder)
    kept = {"a.report.json": "a.onnx 1", "a.report.html": "a.onnx 1"}
    assert reports(place) == {"report.json": "b.onnx", "report.html": "b.onnx", **kept}

    publish(models / "a.onnx", "2", folder=folder)
    kept = {"b.report.json": "b.onnx", "b.report.html": "b.onnx"}
    assert reports(place) == {"report.json": "a.onnx 2", "report.html": "a.onnx 2", **kept}


def test_models_of_one_name_in_two_folders_both_keep_a_report(tmp_path: Path) -> None:
    place = tmp_path / "reports"
    for output in ("x/b.onnx", "y/b2.onnx", "y/b.onnx"):
        publish(tmp_path / output, output, folder=place)
    assert reports(place)["b.report.json"] == "b.onnx x/b.onnx"
    assert reports(place)["b2.report.json"] == "b2.onnx y/b2.onnx"
    assert reports(place)["report.json"] == "b.onnx y/b.onnx"


def test_a_users_own_file_with_a_reports_name_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.report.json").write_text('{"of": "mine"}')
    (out / "a.report.html").write_text("mine")
    for name in ("a", "b", "a"):
        publish(out / f"{name}.onnx", name)
    assert (out / "a.report.json").read_text() == '{"of": "mine"}'
    assert (out / "a.report.html").read_text() == "mine"


def test_the_same_model_again_replaces_its_report(tmp_path: Path) -> None:
    for note in "12":
        publish(tmp_path / "out" / "a.onnx", note)
    assert reports(tmp_path / "out") == {"report.json": "a.onnx 2", "report.html": "a.onnx 2"}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"output": null}', '{"output": 7}', '{"output": ".."}', '{"output": "a\\u0000"}']
)
def test_a_report_of_nobodys_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    keep_others(tmp_path, tmp_path / "a.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_no_name_in_a_report_leads_out_of_its_folder(tmp_path: Path) -> None:
    place = tmp_path / "reports"
    place.mkdir()
    (place / "report.json").write_text(json.dumps({"output": "../../elsewhere/../x.onnx"}))
    keep_others(place, tmp_path / "a.onnx")
    assert sorted(p.name for p in place.iterdir()) == ["report.json", "x.report.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["reports"]


def test_reports_are_no_files_of_a_model_folder(tmp_path: Path) -> None:
    for name in ("config.json", "report.json", "a.report.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert {p.name for p in _files_of_folder(tmp_path)} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("gpt.pt", "gpt.pt", None),
        ("../gpt.pt", "gpt.pt", None),
        ("{here}/gpt.pt", "gpt.pt", None),
        ("gpt.pt", "gpt.onnx", "out.onnx has replaced the export of gpt.pt"),
        ("a/gpt.pt", "b/gpt.pt", "out.onnx has replaced the export of a/gpt.pt"),
        ("{here}/a/gpt.pt", "gpt.pt", "out.onnx has replaced the export of {here}/a/gpt.pt"),
    ],
)
def test_an_export_that_replaces_another_sources_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, now: str, said: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "out.onnx"
    assert replaced(tmp_path, output, Path(now)) is None
    output.touch()
    assert replaced(tmp_path, output, Path(now)) == "out.onnx has replaced a file of that name"
    content = {"output": str(output), "source": before.format(here=tmp_path)}
    for name in ("report.json", "out.report.json"):
        (tmp_path / name).write_text(json.dumps(content))
        assert replaced(tmp_path, output, Path(now)) == (said and said.format(here=tmp_path))
        (tmp_path / name).write_text(json.dumps(content | {"output": "other.onnx"}))


def test_two_sources_of_one_name_end_in_one_line(tmp_path: Path) -> None:
    first, second = (small_models.write(small_models.ATTENTION, tmp_path / n) for n in ("gpt.onnx", "gpt.pb"))
    output = tmp_path / "gpt.flash.onnx"
    assert flash_export.rewrite(first, output=output).warnings == ()
    assert flash_export.rewrite(first, output=output).warnings == ()
    (warning,) = flash_export.rewrite(second, output=output).warnings
    assert warning == f"gpt.flash.onnx has replaced the export of {first}"
