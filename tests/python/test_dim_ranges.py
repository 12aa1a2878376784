# SPDX-License-Identifier: Apache-2.0
"""What a model was exported for bounds the shapes of its engines and runs, from the exporter to every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import flash_export
from flash_export.errors import EXIT_OK, EXIT_USAGE, UsageError
from flash_trt import onnx_file, shape_agreement, tensor_files
from flash_trt.backends import Backend
from flash_trt.compare_inputs import InputOptions, plan_runs
from flash_trt.output import sidecar_path

POSITIONS, WIDTH, HEADS = 77, 32, 2
RANGE = f"seq in 1..{POSITIONS}"

Command = Callable[..., int]
Shape = tuple[int, ...]


class Positions(torch.nn.Module):
    """One attention after a table of 77 positions, as CLIP's text encoder has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = torch.nn.Embedding(POSITIONS, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, WIDTH]`` to the same."""
        x = x + self.positions(torch.arange(x.shape[1]))
        parts = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return out.transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fused file; the unfused one lies beside it."""
    path = tmp_path_factory.mktemp("ranges") / "m.flash.onnx"
    shapes = {"x": ["batch", f"seq=1..{POSITIONS}", str(WIDTH)]}
    flash_export.export(Positions().eval(), {"x": torch.zeros(2, 5, WIDTH)}, dynamic_shapes=shapes, output=path)
    return path


@pytest.fixture
def unfused(model: Path) -> Path:
    """The unfused file."""
    return model.with_name("m.flash.unfused.onnx")


def test_both_files_say_their_ranges(model: Path, unfused: Path) -> None:
    for path in (model, unfused):
        ranges = onnx_file.read(path).dim_ranges
        assert ranges["seq"] == (1, POSITIONS)
        assert ranges["batch"][0] == 1


@pytest.mark.parametrize("kind", ["fused", "unfused"])
def test_a_build_without_shapes_stays_within_them(
    rtx: Backend, model: Path, unfused: Path, kind: str, tmp_path: Path, flash_trt: Command
) -> None:
    engine = tmp_path / "m.engine"
    source = model if kind == "fused" else unfused
    assert flash_trt("build", source, "-o", engine, "--target", "sm80", "--allow-none") == EXIT_OK
    (profile,) = json.loads(sidecar_path(engine).read_text())["profiles"]
    assert {tuple(limits["max"][:2]) for limits in profile.values()} == {(8, POSITIONS)}


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "--target", "sm80", "--shape", f"x:1x1x{WIDTH},1x5x{WIDTH},1x78x{WIDTH}"),
        ("run", "--shape", f"x:1x78x{WIDTH}"),
        ("bench", "--at", "seq=78"),
    ],
    ids=lambda a: a[0],
)
def test_a_shape_outside_them_is_refused_with_dim_and_range(
    model: Path, arguments: tuple[str, ...], flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = arguments
    assert flash_trt(command, model, *rest) == EXIT_USAGE
    told = " ".join(capsys.readouterr().err.split())
    assert RANGE in told
    assert "78" in told


def test_an_input_outside_them_is_refused_before_it_runs(
    model: Path, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros((1, 78, WIDTH), np.float32))
    assert flash_trt("run", model, "--inputs", tmp_path / "in.npz") == EXIT_USAGE
    assert RANGE in " ".join(capsys.readouterr().err.split())


def test_values_outside_them_are_refused_by_a_comparison_in_the_same_words(
    model: Path, unfused: Path, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros((1, 78, WIDTH), np.float32))
    assert flash_trt("compare", model, unfused, "--values", tmp_path / "in.npz") == EXIT_USAGE
    assert RANGE in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("shape", [(0, 5, WIDTH), (3, 0, WIDTH)], ids=["batch", "length"])
def test_a_tensor_without_elements_is_taken(model: Path, tmp_path: Path, flash_trt: Command, shape: Shape) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros(shape, np.float32))
    assert flash_trt("run", model, "--inputs", tmp_path / "in.npz", "-o", tmp_path / "out.npz") == EXIT_OK
    (made,) = tensor_files.read(tmp_path / "out.npz").values()
    assert made.shape == shape


@pytest.mark.parametrize("low", [0, 1, 2])
def test_a_size_of_0_is_refused_where_the_model_needs_more_than_one(low: int) -> None:
    graph_input, limits = onnx_file.GraphInput("x", 1, ("seq",)), {"seq": (low, 9)}
    if low < 2:
        shape_agreement.require_taken("x", graph_input, (0,), limits)
    for wrong in ((0,) if low == 2 else (10,), (5, 5)):
        with pytest.raises(UsageError):
            shape_agreement.require_taken("x", graph_input, wrong, limits)


def test_drawn_inputs_stay_within_them(model: Path, unfused: Path, flash_trt: Command) -> None:
    drawn = [
        trial.feeds["x"].shape[1] for choices in plan_runs(InputOptions(), onnx_file.read(unfused)) for trial in choices
    ]
    assert max(drawn) == POSITIONS
    assert flash_trt("compare", model, unfused) == EXIT_OK
    assert flash_trt("run", model) == EXIT_OK


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Gives the shape of an input whose lengths are multiples of names that stand nowhere else."""
    dims = ["b", 3, "16*h", "16*w + 1"]
    given = onnx.helper.make_tensor_value_info("img", onnx.TensorProto.FLOAT, dims)
    shape = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT64, [4])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Shape", ["img"], ["y"])], "g", [given], [shape])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), tmp_path / "image.onnx")
    return tmp_path / "image.onnx"


def test_a_shape_of_multiples_is_the_one_that_runs(image: Path, tmp_path: Path, flash_trt: Command) -> None:
    assert flash_trt("run", image, "--shape", "img:2x3x48x33", "-o", tmp_path / "y.npz") == EXIT_OK
    assert np.load(tmp_path / "y.npz")["y"].tolist() == [2, 3, 48, 33]
    options = InputOptions(shapes=("img:2x3x48x33,2x3x64x33,2x3x80x49",))
    planned = plan_runs(options, onnx_file.read(image))
    drawn = {trial.feeds["img"].shape for choices in planned for trial in choices}
    assert {shape[:2] for shape in drawn} == {(2, 3)}
    assert {shape[2] for shape in drawn} <= {48, 64, 80}
    assert {shape[3] for shape in drawn} <= {33, 49}


def test_inspect_tells_them(model: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash_trt("inspect", model) == EXIT_OK
    assert f"seq 1..{POSITIONS}" in capsys.readouterr().out
