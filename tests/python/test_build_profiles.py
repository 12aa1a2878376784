# SPDX-License-Identifier: Apache-2.0
"""An input that TensorRT reads as a shape gets its values from --shape; built for real, and held to when it is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from flash_export.errors import EXIT_OK, EXIT_USAGE, UsageError
from flash_trt import engine_file
from flash_trt.output import sidecar_path

Command = Callable[..., int]


def _save(path: Path, node: onnx.NodeProto, x: list[int | str], target: list[int]) -> Path:
    """One node of ``x`` and ``target``."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, x),
        helper.make_tensor_value_info("target", TensorProto.INT64, target),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [f"d{i}" for i in range(target[0])])
    graph = helper.make_graph([node], "g", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture
def reshape(tmp_path: Path) -> Path:
    return _save(tmp_path / "m.onnx", helper.make_node("Reshape", ["x", "target"], ["y"]), ["rows", "columns"], [2])


@pytest.fixture
def build(rtx: object, flash_trt: Command) -> Command:
    """``flash-trt build`` of a model for one generation with the given shapes."""
    return lambda model, *shapes: flash_trt(
        "build", model, "--allow-none", "--target", "sm80", *(word for text in shapes for word in ("--shape", text))
    )


def test_values_are_given_as_a_shape_is_and_held_to(reshape: Path, build: Command) -> None:
    assert build(reshape, "x:1x4,2x4,4x4", "target:1x4,2x4,4x4") == EXIT_OK
    engine = engine_file.read(reshape.with_suffix(".engine"))
    (profile,) = json.loads(sidecar_path(engine.path).read_text())["profiles"]
    assert profile["target"] == {"min": [1, 4], "opt": [2, 4], "max": [4, 4]}
    x = np.zeros((4, 4), np.float32)
    engine_file.require_shapes(engine, {"x": x, "target": np.array([4, 4])})
    with pytest.raises(UsageError) as caught:
        engine_file.require_shapes(engine, {"x": x, "target": np.array([2, 8])})
    assert (caught.value.got, caught.value.need) == ("2x8", "1x4 to 4x4")


def test_values_that_are_not_given_are_asked_for(
    reshape: Path, build: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    static = _save(tmp_path / "s.onnx", helper.make_node("Expand", ["x", "target"], ["y"]), [1], [1])
    for model, shapes, need in (
        (reshape, ("x:1x4,2x4,4x4",), "target:MIN,OPT,MAX of 2 values each"),
        (static, (), "target:MIN,OPT,MAX of 1 value each"),
    ):
        assert build(model, *shapes) == EXIT_USAGE
        assert need in capsys.readouterr().err
    assert build(static, "target:1,4,8") == EXIT_OK


def test_an_input_that_is_no_shape_takes_no_values(
    build: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [2]) for name in ("x", "target")]
    output = helper.make_tensor_value_info("y", TensorProto.INT64, [2])
    graph = helper.make_graph([helper.make_node("Add", ["x", "target"], ["y"])], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx")
    assert build(tmp_path / "m.onnx", "target:1x1,4x4,8x8") == EXIT_USAGE
    assert "does not read it as a shape" in capsys.readouterr().err
    assert build(tmp_path / "m.onnx", "target:2") == EXIT_OK
