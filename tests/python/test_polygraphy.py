# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_trt.polygraphy`` is Polygraphy with our plugin loaded; its own inputs hide what a range shows."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_graphsurgeon
import pytest
import yaml
from onnx import helper
from polygraphy.backend.common import invoke_from_script
from python.attention_models import HEAD_DIM, HEADS, SCALE, flash_node, fused, renamed, unfused

from flash_export import command
from flash_export.errors import EXIT_MISSING, EXIT_OK, EXIT_USAGE, MissingHere, UsageError
from flash_export.op import ATTENTION_OPERATORS
from flash_trt import polygraphy, polygraphy_matches
from flash_trt.output import sidecar_path
from flash_trt.plan import plugin_records

Command = Callable[..., int]
SHAPES = f"query:1x{HEADS}x1x{HEAD_DIM},2x{HEADS}x37x{HEAD_DIM},3x{HEADS}x131x{HEAD_DIM}"


def _with_a_mask(path: Path) -> Path:
    """The unfused attention, without a causal mask, plus an input ``bias`` on its scores."""
    model = onnx.load(unfused(path, causal=False))
    (scores,) = (node for node in model.graph.node if node.op_type == "Identity")
    scores.CopyFrom(helper.make_node("Add", ["scaled", "bias"], ["scores"]))
    model.graph.input.append(helper.make_tensor_value_info("bias", onnx.TensorProto.FLOAT, ["batch", 1, "seq", "seq"]))
    onnx.save(model, path)
    return path


def _polygraphy(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, "-m", "flash_trt.polygraphy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=variables)


@pytest.mark.parametrize("name", ["query", "x[0]", "x*", "in?put"])
def test_the_convert_line_that_build_prints_builds_the_same_plugins(
    rtx: object, tmp_path: Path, flash_trt: Command, name: str
) -> None:
    model, engine = renamed(fused(tmp_path / "a model.onnx"), name), tmp_path / "m.engine"
    shapes = SHAPES.replace("query", name)
    assert flash_trt("build", model, "-o", engine, "--target", "sm80,sm120", "--shape", shapes) == EXIT_OK
    line = json.loads(sidecar_path(engine).read_text())["polygraphy"]
    expected = {str(record) for record in plugin_records(engine.read_bytes())}
    engine.unlink()
    variable, python, *arguments = shlex.split(line)
    key, _, value = variable.partition("=")
    assert [python, *arguments[:2]] == ["python", "-m", "flash_trt.polygraphy"]
    ran = _polygraphy(*arguments[2:], **{key: value})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "[(8, 0), (12, 0)]" in ran.stdout
    assert {str(record) for record in plugin_records(engine.read_bytes())} == expected != set()


def test_match_lists_what_flash_export_fuses_with_its_attributes(tmp_path: Path) -> None:
    found = tmp_path / "found.yaml"
    ran = _polygraphy("plugin", "match", unfused(tmp_path / "m.onnx"), "-o", found)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (plugin,) = yaml.safe_load_all(found.read_text())
    assert plugin["op"] == "FlashAttention"
    (instance,) = plugin["instances"]
    assert set(instance["inputs"]) == {"query", "key", "value"}
    assert instance["outputs"] == ["output"]
    assert instance["attributes"]["causal"] == 1
    assert instance["attributes"]["scale"] == SCALE


def test_match_names_the_operator_that_each_attention_becomes_and_its_inputs_alone(tmp_path: Path) -> None:
    model = _with_a_mask(tmp_path / "m.onnx")
    found = {
        operator: polygraphy_matches.matches(onnx_graphsurgeon.import_onnx(onnx.load(model)), operator)
        for operator in ATTENTION_OPERATORS
    }
    ((name, (instance,)),) = ((name, instances) for name, instances in found.items() if instances)
    assert name == "FlashAttentionEx"
    assert instance["attributes"]["has_bias"] == 1
    assert instance["inputs"] == ["query", "key", "value", "bias"]
    folders = {path.parent.name for path in polygraphy.PLUGINS.glob("*/pattern.py")}
    assert folders == set(ATTENTION_OPERATORS)
    for folder in folders:
        script = str(polygraphy.PLUGINS / folder / "pattern.py")
        assert invoke_from_script(script, "get_plugin_metadata") == {"name": folder, "op": folder}


def test_a_value_that_only_a_proven_mask_reads_is_no_input(tmp_path: Path) -> None:
    proto = onnx.load(unfused(tmp_path / "m.onnx"))
    proto.graph.input.append(helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["seq"]))
    (length,) = (node for node in proto.graph.node if node.op_type == "Shape")
    length.CopyFrom(helper.make_node("Shape", ["ids"], ["length"]))
    (instance,) = polygraphy_matches.matches(onnx_graphsurgeon.import_onnx(proto), "FlashAttention")
    assert instance["inputs"] == ["query", "key", "value"]
    assert instance["attributes"]["causal"] == 1


@pytest.mark.parametrize("fallback", [True, False])
def test_match_lists_no_node_that_a_file_has_already(tmp_path: Path, fallback: bool) -> None:
    graph = onnx_graphsurgeon.import_onnx(onnx.load(fused(tmp_path / "m.onnx", fallback=fallback)))
    assert [polygraphy_matches.matches(graph, operator) for operator in ATTENTION_OPERATORS] == [[], [], []]


def test_polygraphys_own_match_takes_the_folder(tmp_path: Path) -> None:
    found, main = tmp_path / "found.yaml", "from polygraphy.tools import main; import sys; sys.exit(main())"
    words = ["plugin", "match", unfused(tmp_path / "m.onnx"), "--plugin-dir", polygraphy.PLUGINS, "-o", found]
    ran = subprocess.run(
        [sys.executable, "-c", main, *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [plugin["op"] for plugin in yaml.safe_load_all(found.read_text())] == ["FlashAttention"]


@pytest.mark.parametrize("with_config", [False, True])
def test_replace_is_refused_since_it_would_rewrite_without_proof(tmp_path: Path, with_config: bool) -> None:
    found, model, output = tmp_path / "found.yaml", unfused(tmp_path / "m.onnx"), tmp_path / "out.onnx"
    with pytest.raises(UsageError, match="does not fuse attention") as refused:
        polygraphy.main(["plugin", "replace", str(model), *(["--config", str(found)] * with_config), "-o", str(output)])
    assert refused.value.do == "flash-export MODEL.onnx"
    assert not output.exists()


def test_a_run_in_tensorrt_without_a_gpu_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flash_trt.gpu.devices", list)
    model = str(fused(tmp_path / "m.onnx"))
    with pytest.raises(MissingHere, match="cannot run here") as refused:
        polygraphy.main(["run", model, "--trt", "--onnxrt"])
    assert "polygraphy convert MODEL.onnx -o MODEL.engine" in refused.value.do
    script = tmp_path / "script.py"
    assert polygraphy.main(["run", model, "--trt", "--gen-script", str(script)]) == 0  # builds and runs nothing
    assert script.is_file()


def test_polygraphys_own_comparison_sees_a_wrong_scale_only_with_a_range(rtx: object, tmp_path: Path) -> None:
    right, wrong = unfused(tmp_path / "u.onnx"), fused(tmp_path / "f.onnx", flash_node(scale=SCALE * 1.01))
    shape = f"[1,{HEADS},131,{HEAD_DIM}]"
    shapes = ["--input-shapes", *(f"{name}:{shape}" for name in ("query", "key", "value"))]
    tolerance = ["--atol", "1e-2", "--rtol", "0"]

    def passes(*values: str) -> bool:
        saved = str(tmp_path / "right.json")
        assert polygraphy.main(["run", str(right), "--onnxrt", *shapes, *values, "--save-outputs", saved]) == 0
        return (
            polygraphy.main(["run", str(wrong), "--onnxrt", *shapes, *values, "--load-outputs", saved, *tolerance]) == 0
        )

    assert passes()
    assert not passes("--val-range", "[-3,3]")


def test_an_unknown_tensorrt_ends_with_2_and_a_missing_plugin_with_5(tmp_path: Path) -> None:
    ran = _polygraphy("--version", FLASH_TRT_BACKEND="tensorrt-12")
    assert ran.returncode == EXIT_USAGE
    assert "auto, tensorrt, tensorrt-rtx" in ran.stderr
    ran = _polygraphy("--version", FLASH_TRT_PLUGIN=str(tmp_path / "nowhere.so"))
    assert ran.returncode == EXIT_MISSING


@pytest.mark.parametrize(
    "words",
    [
        "plugin match none.onnx",
        "inspect model none.onnx",
        "inspect data none.json",
        "run m.onnx --onnxrt --load-inputs none.json",
        "run none.onnx --onnxrt",
        "convert --fp16 m.onnx none.onnx",
        "convert none.onnx",
        "convert -v none.onnx",
        "convert -o m.engine --fp16 none.onnx",
        "convert folder.onnx",
    ],
)
def test_where_polygraphy_would_end_with_a_traceback_there_are_five_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fused(tmp_path / "m.onnx")
    (tmp_path / "folder.onnx").mkdir()
    monkeypatch.setattr(sys, "argv", ["polygraphy", *words.split()])
    assert command.run(polygraphy.script) == EXIT_USAGE
    told = capsys.readouterr().err
    assert f"\n  where polygraphy {words}\n  got   " in told
    assert words.split()[-1].removeprefix("--") in told
    assert "Traceback" not in told


def test_a_model_that_is_written_need_not_be_there(tmp_path: Path) -> None:
    written = tmp_path / "out.onnx"
    assert polygraphy.main(["surgeon", "sanitize", str(unfused(tmp_path / "m.onnx")), "-o", str(written)]) == 0
    assert written.is_file()


def test_a_file_of_the_command_behind_check_is_that_commands_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """debug reduce writes the model that its --check reads."""
    monkeypatch.chdir(tmp_path)
    model = str(unfused(tmp_path / "m.onnx"))
    check = ["--check", sys.executable, "-c", "pass", "polygraphy_debug.onnx"]
    reduce = ["debug", "reduce", model, "-o", "r.onnx", "--mode", "bisect"]
    assert polygraphy.main([*reduce, *check]) == 0


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENAMETOOLONG, errno.EACCES, errno.ENOTDIR])
def test_a_file_that_cannot_be_written_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def fails(_: object) -> int:
        raise OSError(number, os.strerror(number), "x.engine")

    monkeypatch.setattr("polygraphy.tools.main", fails)
    monkeypatch.setattr(sys, "argv", ["polygraphy", "convert", str(fused(tmp_path / "m.onnx")), "-o", "x.engine"])
    assert command.run(polygraphy.script) == EXIT_USAGE
    told = capsys.readouterr().err
    assert os.strerror(number) in told
    assert "folders that can be written to" in told


def test_a_full_disk_is_told_as_that(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("polygraphy.tools.main", fails)
    monkeypatch.setattr(sys, "argv", ["polygraphy", "--version"])
    assert command.run(polygraphy.script) == EXIT_MISSING
    assert "No space left" in capsys.readouterr().err


def test_a_wrong_argument_is_told_by_polygraphy() -> None:
    ran = _polygraphy("nonsense")
    assert ran.returncode == EXIT_USAGE
    assert "invalid choice" in ran.stderr


def test_every_other_argument_is_polygraphys() -> None:
    ran = _polygraphy("--version")
    assert ran.returncode == 0, ran.stderr
    assert "Polygraphy" in ran.stdout
