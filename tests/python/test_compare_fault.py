# SPDX-License-Identifier: Apache-2.0
"""A comparison that a fault of attention would pass as well is told: it proves nothing of attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from python.attention_models import FLOAT, HALF, HEAD_DIM, HEADS, SCALE, flash_node, fused, unfused

from flash_export.errors import EXIT_OK, EXIT_UNSUPPORTED, EXIT_USAGE

Command = Callable[..., int]
ONE_KEY = f"query:2x{HEADS}x1x{HEAD_DIM}"


def _pair(tmp_path: Path, *, dtype: int = FLOAT, scale: float = SCALE) -> tuple[Path, Path]:
    return fused(tmp_path / "f.onnx", flash_node(scale=scale), dtype=dtype), unfused(tmp_path / "u.onnx", dtype=dtype)


def _short(path: Path, most: int = 7) -> Path:
    """The model with a table of ``most`` positions added to its output: it takes no longer lengths."""
    model = onnx.load(path)
    output = model.graph.output[0].name
    constants = {"places": np.zeros((most, 1), np.float32), "first": np.array(0), "step": np.array(1)}
    model.graph.initializer.extend(numpy_helper.from_array(array, f"t_{name}") for name, array in constants.items())
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["query"], ["t_sizes"], start=2, end=3),
            helper.make_node("Squeeze", ["t_sizes"], ["t_length"]),
            helper.make_node("Range", ["t_first", "t_length", "t_step"], ["t_rows"]),
            helper.make_node("Gather", ["t_places", "t_rows"], ["t_placed"]),
            helper.make_node("Add", [output, "t_placed"], ["placed"]),
        ]
    )
    model.graph.output[0].name = "placed"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("scale", [SCALE, 3 * SCALE])
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["fp32", "fp16"])
def test_the_users_shapes_of_one_key_are_warned_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], scale: float, dtype: int
) -> None:
    pair, written = _pair(tmp_path, dtype=dtype, scale=scale), tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--shape", ONE_KEY, "--json", written) == EXIT_OK
    assert "nothing of attention was compared" in " ".join(capsys.readouterr().err.split())
    verdict = json.loads(written.read_text())
    assert (verdict["passed"], verdict["attention_compared"]) == (True, False)


@pytest.mark.parametrize("scale", [SCALE, 3 * SCALE])
def test_drawn_runs_that_all_have_one_key_are_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], scale: float
) -> None:
    pair, written = [_short(path) for path in _pair(tmp_path, scale=scale)], tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--json", written) == EXIT_USAGE
    told = " ".join(capsys.readouterr().err.split())
    assert "nothing of attention was compared" in told
    assert "--shape NAME:MIN,OPT,MAX" in told
    verdict = json.loads(written.read_text())
    assert (verdict["passed"], verdict["attention_compared"]) == (False, False)


def test_lengths_of_several_keys_that_the_model_takes_are_compared(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, written = [_short(path) for path in _pair(tmp_path)], tmp_path / "v.json"
    shape = f"query:1x{HEADS}x2x{HEAD_DIM},2x{HEADS}x5x{HEAD_DIM},2x{HEADS}x7x{HEAD_DIM}"
    assert flash_trt("compare", *pair, "--shape", shape, "--json", written) == EXIT_OK
    assert "nothing of attention" not in " ".join(capsys.readouterr().err.split())
    assert json.loads(written.read_text())["attention_compared"] is True


def test_a_fused_file_with_its_weights_beside_it_is_tried_with_the_fault_too(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The constant lies in another file, which the model with the fault has to find."""
    pair = _pair(tmp_path)
    weight = np.ones((HEADS, 1, HEAD_DIM), np.float32)
    for path in pair:
        model = onnx.load(path)
        model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
        model.graph.node.append(helper.make_node("Mul", ["output", "weight"], ["scaled_output"]))
        model.graph.output[0].name = "scaled_output"
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=200)
    assert flash_trt("compare", *pair, "--shape", ONE_KEY) == EXIT_OK
    assert "nothing of attention was compared" in " ".join(capsys.readouterr().err.split())


def test_a_fused_file_that_onnx_runtime_does_not_load_is_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnx's reference evaluator takes float indices; no runtime does."""
    pair = _pair(tmp_path)
    model = onnx.load(pair[0])
    model.graph.initializer.append(numpy_helper.from_array(np.array([0.0, 1.0, 2.0], np.float32), "order"))
    model.graph.node.append(helper.make_node("Gather", ["output", "order"], ["gathered"], axis=1))
    model.graph.output[0].name = "gathered"
    onnx.save(model, pair[0])
    assert flash_trt("compare", *pair) == EXIT_UNSUPPORTED
    assert "ONNX Runtime cannot load the fused model" in " ".join(capsys.readouterr().err.split())
