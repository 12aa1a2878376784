# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_trt.polygraphy`` is Polygraphy with our plugin loaded; its own inputs hide what a range shows."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from python.attention_models import HEAD_DIM, HEADS, SCALE, flash_node, fused, unfused

from flash_export.errors import EXIT_MISSING, EXIT_OK, EXIT_USAGE
from flash_trt import polygraphy
from flash_trt.output import sidecar_path
from flash_trt.plan import plugin_records

Command = Callable[..., int]
SHAPES = f"query:1x{HEADS}x1x{HEAD_DIM},2x{HEADS}x37x{HEAD_DIM},3x{HEADS}x131x{HEAD_DIM}"


def _polygraphy(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, "-m", "flash_trt.polygraphy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=variables)


def test_the_convert_line_that_build_prints_builds_the_same_plugins(
    rtx: object, tmp_path: Path, flash_trt: Command
) -> None:
    model, engine = fused(tmp_path / "a model.onnx"), tmp_path / "m.engine"
    assert flash_trt("build", model, "-o", engine, "--target", "sm80,sm120", "--shape", SHAPES) == EXIT_OK
    line = json.loads(sidecar_path(engine).read_text())["polygraphy"]
    expected = {str(record) for record in plugin_records(engine.read_bytes())}
    engine.unlink()
    variable, python, *arguments = shlex.split(line)
    name, _, value = variable.partition("=")
    assert [python, *arguments[:2]] == ["python", "-m", "flash_trt.polygraphy"]
    ran = _polygraphy(*arguments[2:], **{name: value})
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


def test_replace_is_refused_since_it_would_rewrite_without_proof(tmp_path: Path) -> None:
    found, model, output = tmp_path / "found.yaml", unfused(tmp_path / "m.onnx"), tmp_path / "out.onnx"
    _polygraphy("plugin", "match", model, "-o", found)
    ran = _polygraphy("plugin", "replace", model, "--config", found, "-o", output)
    assert ran.returncode != 0
    assert "flash-export MODEL.onnx" in ran.stderr
    assert not output.exists()


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


def test_every_other_argument_is_polygraphys() -> None:
    ran = _polygraphy("--version")
    assert ran.returncode == 0, ran.stderr
    assert "Polygraphy" in ran.stdout
