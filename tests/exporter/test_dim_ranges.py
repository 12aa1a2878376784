# SPDX-License-Identifier: Apache-2.0
"""The ranges of dynamic dims go through a file and come back; a stranger's nonsense says nothing."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from exporter.small_models import ATTENTION, write

from flash_export import dim_ranges
from flash_export.inputs import MAX_DIM


def test_ranges_come_back_and_other_metadata_stays(tmp_path: Path) -> None:
    path = write(ATTENTION, tmp_path / "m.onnx")
    model = onnx.load(path)
    onnx.helper.set_model_props(model, {"author": "somebody"})
    onnx.save(model, path)
    ranges = {"B": (1, MAX_DIM), "past": (0, 77), "S": (1, 77)}
    dim_ranges.write(path, ranges)
    dim_ranges.write(path, ranges)
    written = onnx.load(path)
    assert dim_ranges.read(written) == ranges
    texts = {entry.key: entry.value for entry in written.metadata_props}
    assert texts == {"author": "somebody", dim_ranges.PROPERTY: '{"B": [1, null], "past": [0, 77], "S": [1, 77]}'}


@pytest.mark.parametrize(
    "text",
    ["", "[", "7", "[1]", '{"S": 7}', '{"S": [1]}', '{"S": [2, 1]}', '{"S": [-1, 4]}', '{"S": [1, 4.5]}',
     '{"S": [true, 4]}', '{"S": [1, 99999999999]}', '{"S": ["1", "4"]}', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_range_is_passed_over(text: str) -> None:
    model = onnx.ModelProto()
    onnx.helper.set_model_props(model, {dim_ranges.PROPERTY: text})
    assert dim_ranges.read(model) == {}


def test_ranges_are_spelled_as_input_takes_them() -> None:
    assert dim_ranges.spell((1, 128)) == "1..128"
    assert dim_ranges.spell((0, MAX_DIM)) == "0.."
