# SPDX-License-Identifier: Apache-2.0
"""``--shape`` of an input that a shape is computed from gives its values, and the model runs on these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from flash_export.errors import EXIT_OK
from flash_trt import onnx_file, tensor_files
from flash_trt.compare_inputs import InputOptions, plan_runs
from flash_trt.engine_file import EngineFile
from flash_trt.onnx_file import GraphInput
from flash_trt.shapes import given_values, parse

Command = Callable[..., int]


@pytest.fixture
def expanding(tmp_path: Path) -> Path:
    """``x`` of one row, spread over ``target``."""
    text = '<ir_version: 9, opset_import: ["" : 18]> g (float[1, s] x, int64[2] target) => (float[a, b] y) '
    onnx.save(onnx.parser.parse_model(text + "{ y = Expand (x, target) }"), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_run_takes_the_usual_values(expanding: Path, tmp_path: Path, flash_trt: Command) -> None:
    given = ("--shape", "x:1x7", "--shape", "target:1x7,5x7,9x7")
    assert flash_trt("run", expanding, *given, "-o", tmp_path / "y.npz") == EXIT_OK
    assert tensor_files.read(tmp_path / "y.npz")["y"].shape == (5, 7)


def test_a_comparison_takes_the_usual_the_largest_and_the_smallest_values_in_turn(
    expanding: Path, tmp_path: Path, flash_trt: Command
) -> None:
    given = ("x:1x7", "target:1x7,5x7,9x7")
    planned = plan_runs(InputOptions(shapes=given), onnx_file.read(expanding))
    assert [trial.feeds["target"].tolist() for (trial, *_) in planned[:3]] == [[5, 7], [9, 7], [1, 7]]
    assert "target=9x7" in planned[1][0].name
    model = onnx.load(expanding)
    model.graph.doc_string = "another file"
    onnx.save(model, tmp_path / "other.onnx")
    flags = [word for text in given for word in ("--shape", text)]
    assert flash_trt("compare", tmp_path / "other.onnx", expanding, *flags) == EXIT_OK


def test_an_engine_is_given_values_that_it_was_built_for(expanding: Path) -> None:
    profile = {
        "x": {"min": [1, 7], "opt": [1, 7], "max": [1, 7]},
        "target": {"min": [2, 7], "opt": [3, 7], "max": [4, 7]},
    }
    engine = EngineFile(Path("m.engine"), {"profiles": [profile]})
    planned = plan_runs(InputOptions(), onnx_file.read(expanding), engine)
    assert {tuple(trial.feeds["target"]) for choices in planned for trial in choices} == {(2, 7), (3, 7), (4, 7)}


def test_values_have_the_inputs_type_and_shape() -> None:
    inputs = [GraphInput("n", onnx.TensorProto.INT32, ()), GraphInput("x", onnx.TensorProto.FLOAT, ("s",))]
    values = given_values(inputs, [parse("n:2,3,4"), parse("x:2,3,4")])
    assert values == {"n": (np.int32(2), np.int32(3), np.int32(4))}
    assert {(array.dtype.name, array.shape) for array in values["n"]} == {("int32", ())}
