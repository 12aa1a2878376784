# SPDX-License-Identifier: Apache-2.0
"""A file that only works at the length it was exported at is refused before anything is fused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from flash_export.errors import UnsupportedModel, UsageError
from flash_export.export import Exported, export
from flash_export.export_lengths import refuse_fixed_lengths
from flash_export.load import load
from flash_export.options import Options

HEADER = '<ir_version: 9, opset_import: ["" : 18]>\n'
EXAMPLE = {"x": np.ones((2, 7, 3), np.float32)}
DIMS = {"batch": (1, 100), "seq": (1, 48)}


def flattened(path: Path, target: list[int]) -> Path:
    """[batch, seq, 3] -> Reshape to ``target``; 0 copies the input's size."""
    numbers = ", ".join(map(str, target))
    graph = "g (float[batch, seq, 3] x) => (float[b, s, t] y) <int64[3] target = {" + numbers + "}>"
    text = HEADER + graph + " { y = Reshape (x, target) }"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def transposed(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    x = inputs["x"]
    return [x.reshape(x.shape[0], 3, x.shape[1])]


def test_a_dynamic_file_passes(tmp_path: Path) -> None:
    refuse_fixed_lengths(flattened(tmp_path / "m.onnx", [0, 3, -1]), transposed, EXAMPLE, DIMS)


@pytest.mark.parametrize(("target", "name"), [([0, 3, 7], "seq = 7"), ([2, 3, -1], "batch = 2")])
def test_a_length_written_as_a_number_is_named(tmp_path: Path, target: list[int], name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"only works at {name}"):
        refuse_fixed_lengths(flattened(tmp_path / "m.onnx", target), transposed, EXAMPLE, DIMS)


def test_beside_a_cache_nobody_is_told_to_give_inputs(tmp_path: Path) -> None:
    file = flattened(tmp_path / "m.onnx", [0, 3, 7])
    for told_in, advice, other in (("--input", "--input", "--kv-cache"), ("--kv-cache", "--kv-cache out", "--input")):
        with pytest.raises(UnsupportedModel) as caught:
            refuse_fixed_lengths(file, transposed, EXAMPLE, DIMS, told_in=told_in)
        assert advice in str(caught.value)
        assert other not in str(caught.value)


def test_a_dimension_with_one_size_is_not_tried(tmp_path: Path) -> None:
    file = flattened(tmp_path / "m.onnx", [0, 3, 7])
    refuse_fixed_lengths(file, transposed, EXAMPLE, {"batch": (1, 100), "seq": (7, 7)})


def test_a_size_that_pytorch_does_not_take_either_is_not_the_exports_fault(tmp_path: Path) -> None:
    def only_seven(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        if inputs["x"].shape[1] != 7:
            raise UsageError("no", where="forward", got="", need="", do="")
        return transposed(inputs)

    file = flattened(tmp_path / "m.onnx", [0, 3, 7])
    refuse_fixed_lengths(file, only_seven, EXAMPLE, DIMS)
    with pytest.raises(UnsupportedModel, match="only works at seq = 7"):
        refuse_fixed_lengths(file, only_seven, EXAMPLE, DIMS, traced=True)


def test_a_file_that_onnx_runtime_does_not_take_is_left_to_the_check(tmp_path: Path) -> None:
    file = flattened(tmp_path / "m.onnx", [5, 5, 5])
    refuse_fixed_lengths(file, transposed, EXAMPLE, DIMS)


def test_a_length_that_is_the_sum_of_two_follows_both(tmp_path: Path) -> None:
    text = "g (float[batch, past] old, float[batch, seq] new, float[batch, all] mask) => (float[b, t] y)"
    model = onnx.parser.parse_model(HEADER + text + " { joined = Concat <axis = 1> (old, new) y = Add (joined, mask) }")
    model.graph.input[2].type.tensor_type.shape.dim[1].dim_param = "past + seq"
    onnx.save(model, tmp_path / "m.onnx")
    example = {name: np.ones((2, size), np.float32) for name, size in (("old", 5), ("new", 3), ("mask", 8))}

    def joined(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([inputs["old"], inputs["new"]], 1) + inputs["mask"]]

    refuse_fixed_lengths(tmp_path / "m.onnx", joined, example, {"past": (0, 64), "seq": (1, 64), "batch": (1, 64)})


class Joined(torch.nn.Module):
    def forward(self, x: torch.Tensor, past: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.cat([past + other, x], 1) * 2


class Paired(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2].reshape(-1, 2, 3) + 1


AUTO = torch.export.Dim.AUTO


def _exported(folder: Path, module: torch.nn.Module, lengths: list[int], dim: object) -> Exported:
    inputs = tuple(torch.ones(4, length, 3) for length in lengths)
    dims = tuple({0: dim, 1: dim if dim is AUTO else torch.export.Dim("seq", min=2)} for _ in lengths)
    torch.export.save(torch.export.export(module, inputs, dynamic_shapes=dims), folder / "m.pt2")
    options = Options(source=folder / "m.pt2")
    return export(load(options), options, folder)


def test_a_dimension_that_torch_export_assumes_to_be_2_and_more_begins_at_1_where_the_file_is_right(
    tmp_path: Path,
) -> None:
    exported = _exported(tmp_path, Joined(), [7, 5, 5], AUTO)
    assert len(exported.dims) >= 3
    assert {low for low, _ in exported.dims.values()} == {1}, "also a length that has two names"
    assert not exported.notes


def test_it_begins_at_2_where_the_program_is_not_right_at_1_and_where_it_has_a_range(tmp_path: Path) -> None:
    exported = _exported(tmp_path, Paired(), [7], AUTO)
    assert [low for low, _ in exported.dims.values()] == [1, 2]
    assert ["x_dim1 = 1: forward takes another way there" in note for note in exported.notes] == [True]
    ranged = _exported(tmp_path, Joined(), [7, 7, 7], torch.export.Dim("batch", min=2, max=9))
    assert ranged.dims["x_dim0"] == (2, 9)
