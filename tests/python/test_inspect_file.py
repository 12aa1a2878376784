# SPDX-License-Identifier: Apache-2.0
"""``flash-trt inspect`` tells what a file holds, and ``build`` who computes each attention, from bytes alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import helper
from python.attention_models import FLOAT, HALF, HEAD_DIM, HEADS, SCALE, flash_node, fused, unfused

from flash_export.errors import EXIT_OK, EXIT_UNSUPPORTED, EXIT_USAGE
from flash_trt import plan_program
from flash_trt.backends import Backend
from flash_trt.byte_sizes import spell_bytes
from flash_trt.output import sidecar_path

Command = Callable[..., int]
SHAPE = f"query:2x{HEADS}x131x{HEAD_DIM}"


def _told(flash_trt: Command, capsys: pytest.CaptureFixture[str], path: Path) -> dict:
    capsys.readouterr()
    assert flash_trt("inspect", path, "--json") == EXIT_OK
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def engine(rtx: Backend, tmp_path: Path, flash_trt: Command) -> Path:
    model = fused(tmp_path / "m.onnx", flash_node(output="a", window_left=77), flash_node(("a", "key", "value")))
    assert flash_trt("build", model, "-o", tmp_path / "m.engine", "--target", "sm80", "--shape", SHAPE) == EXIT_OK
    return tmp_path / "m.engine"


def test_an_engine_tells_its_plugins_with_their_attributes(
    engine: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _told(flash_trt, capsys, engine)
    assert told["trusted"] is True
    assert {plugin["attributes"]["window_left"] for plugin in told["plugins"]} == {77, -1}
    assert {plugin["attributes"]["scale"] for plugin in told["plugins"]} == {SCALE}
    assert {plugin["version"] for plugin in told["plugins"]} == {"1"}
    assert told["sidecar"]["targets"] == ["sm80"]
    assert _told(flash_trt, capsys, sidecar_path(engine)) == told
    assert flash_trt("inspect", engine) == EXIT_OK
    said = capsys.readouterr().out
    assert "2 by our plugin" in said
    assert "the plan holds every FlashAttention node with its attributes" in said


def test_an_engine_that_is_not_its_sidecars_is_told_so(
    engine: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine.open("ab") as file:
        file.write(b"tampered")
    assert _told(flash_trt, capsys, engine)["trusted"] is False
    assert flash_trt("inspect", engine) == EXIT_OK
    said = capsys.readouterr().out
    assert "NOT its sidecar's" in said
    assert "by our plugin" not in said, "what the sidecar says is of another engine"


@pytest.mark.parametrize("content", ["", "garbage", "[]"])
def test_an_engine_whose_sidecar_cannot_be_read_is_told_so(
    engine: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    sidecar_path(engine).write_text(content)
    for path in (engine, sidecar_path(engine)):
        assert flash_trt("inspect", path) == EXIT_OK
        assert "there is no sidecar that can be read" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("fallback", [True, False])
def test_an_onnx_file_tells_its_nodes_and_bodies(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], fallback: bool
) -> None:
    told = _told(flash_trt, capsys, fused(tmp_path / "m.onnx", fallback=fallback))
    assert [node["name"] for node in told["nodes"]] == ["attention"]
    assert told["bodies"] == (["FlashAttention"] if fallback else [])
    assert told["inputs"]["query"] == f"[batch, {HEADS}, seq, {HEAD_DIM}]"


def test_what_is_no_engine_sidecar_or_model_ends_with_2(tmp_path: Path, flash_trt: Command) -> None:
    (tmp_path / "x.engine.json").write_text("{}")
    (tmp_path / "x").write_text("text")
    for name in ("x.engine.json", "x", "no_such_file"):
        assert flash_trt("inspect", tmp_path / name) == EXIT_USAGE


def test_a_model_without_a_node_needs_no_library(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("inspect", unfused(tmp_path / "u.onnx")) == EXIT_OK
    told = capsys.readouterr().out
    assert "no node" in told
    assert "library" not in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"schema": 1, "sites": []}', "this JSON is no sidecar of an engine"),
        ("{ no JSON", "this JSON is no sidecar of an engine"),
        ("", "this JSON is no sidecar of an engine"),
        ("garbage", "this JSON is no sidecar of an engine"),
        ("[]", "this JSON is no sidecar of an engine"),
        ('{"schema": 1, "engine": {}}', "the engine that this sidecar describes is not beside it"),
    ],
)
def test_json_that_is_no_sidecar_is_told_apart_from_one_without_its_engine(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tmp_path / "report.json").write_text(text)
    assert flash_trt("inspect", tmp_path / "report.json") == EXIT_USAGE
    assert told in capsys.readouterr().err


def test_a_model_of_a_newer_operator_version_is_refused_by_every_command(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    path, old = fused(tmp_path / "m.onnx"), fused(tmp_path / "old.onnx")
    model = onnx.load(path)
    for opset in [*model.opset_import, *(o for function in model.functions for o in function.opset_import)]:
        opset.version = 2 if opset.domain == "flash_export" else opset.version
    onnx.save(model, path)
    both = [("compare", path, old), ("compare", old, path), ("bench", old, path), ("bench", path, old)]
    alone = [("inspect", path), ("build", path), ("run", path), ("triton", tmp_path / "repository", path)]
    for command in (*alone, *both):
        assert flash_trt(*command) == EXIT_UNSUPPORTED, command
        told = capsys.readouterr().err
        assert "newer flash-export" in told
        assert "version 2" in told
    assert not list((tmp_path / "repository").glob("*"))


# --- who computes each attention --------------------------------------------------------------------------------------


def _attention(rtx: Backend, flash_trt: Command, model: Path) -> list[tuple[str, str]]:
    output = model.with_suffix(".engine")
    arguments = ("--target", "sm80,sm89", "--shape", SHAPE, "--allow-none")
    assert flash_trt("build", model, "-o", output, *arguments) == EXIT_OK
    return [(found["name"], found["by"]) for found in json.loads(sidecar_path(output).read_text())["attention"]]


def test_every_node_of_ours_is_the_plugins(rtx: Backend, tmp_path: Path, flash_trt: Command) -> None:
    assert _attention(rtx, flash_trt, fused(tmp_path / "m.onnx")) == [("attention", "plugin")]


def test_an_attention_that_tensorrt_fuses_and_one_that_it_does_not_are_told_apart(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    ((_, by),) = _attention(rtx, flash_trt, unfused(tmp_path / "half.onnx", dtype=HALF, causal=False))
    assert by == "tensorrt_fused"
    ((name, by),) = _attention(rtx, flash_trt, unfused(tmp_path / "full.onnx", dtype=FLOAT))
    assert by == "unfused_chain"
    said = capsys.readouterr().out
    assert f"an unfused chain: {name}" in said
    assert "plugin layers   none" in said
    assert "proven" not in said  # there is no node to prove
    assert " (0." not in said


def test_the_scratch_of_an_unfused_chain_holds_its_scores(rtx: Backend, tmp_path: Path, flash_trt: Command) -> None:
    model = unfused(tmp_path / "m.onnx", dtype=FLOAT)
    proto = onnx.load(model)
    for value in [*proto.graph.input, *proto.graph.output]:
        value.CopyFrom(helper.make_tensor_value_info(value.name, FLOAT, [2, HEADS, 131, HEAD_DIM]))
    onnx.save(proto, model)
    _attention(rtx, flash_trt, model)
    (found,) = json.loads(sidecar_path(tmp_path / "m.engine").read_text())["attention"]
    assert found["scratch_bytes"] >= 2 * HEADS * 131 * 131 * 4


@pytest.mark.parametrize(("shortest", "takes"), [(1, True), (17, False)])
def test_the_scratch_of_a_node_of_ours_is_the_workspace_that_the_plan_holds(
    rtx: Backend, tmp_path: Path, flash_trt: Command, shortest: int, takes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fused(tmp_path / "m.onnx", dtype=HALF)
    ends = [f"{rows}x{HEADS}x{length}x{HEAD_DIM}" for rows, length in ((1, shortest), (1, 33), (2, 700))]
    assert flash_trt("build", model, "--target", "sm80,sm89", "--shape", f"query:{','.join(ends)}") == EXIT_OK
    sidecar = json.loads(sidecar_path(tmp_path / "m.engine").read_text())
    (found,) = sidecar["attention"]
    # Nothing else in this engine has scratch memory, but TensorRT aligns it. Only 16 queries or fewer are split.
    assert sidecar["scratch_bytes"] - 512 <= found["scratch_bytes"] <= sidecar["scratch_bytes"]
    assert (found["scratch_bytes"] > 0) is takes
    taken = f"with up to {spell_bytes(found['scratch_bytes'])} of scratch memory each"
    spelled = f"1 by our plugin, {taken if takes else 'without scratch memory'}"
    assert spelled in capsys.readouterr().out


def test_a_plan_without_its_program_tells_no_workspace() -> None:
    assert plan_program.workspaces(b"ftrt") == {}
    layer = b'\n  custom_layer={ name="a" output={"y.1" "a_wksp.1" } input={"x.1" } }'
    assert plan_program.workspaces(layer) == {"a": None}  # one that is written in a form not known here
    sized = [b'\n  tensor={ a=1 dims={ %d } name="a_wksp.1" region="devmem_0" type=uint8 }' % n for n in (7, 3)]
    assert plan_program.workspaces(b"".join([layer, *sized])) == {"a": 7}
