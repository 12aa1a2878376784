# SPDX-License-Identifier: Apache-2.0
"""A file of weights is mapped while a tensor of it is read and no longer: every map counts all of it once more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.save_weights import write_model


def with_many_small_weights(folder: Path) -> ir.Model:
    lines = " ".join(f"x{i + 1} = Add (x{i}, w{i})" for i in range(30))
    constants = ", ".join(f"float[9] w{i} = {{{', '.join(['1.5'] * 9)}}}" for i in range(30))
    header = '<ir_version: 9, opset_import: ["": 18]>'
    model = ir.from_onnx_text(f"{header} g (float[9] x0) => (float[9] x30) <{constants}> {{ {lines} }}")
    ir.save(model, folder / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    return ir.load(folder / "m.onnx")


def maps(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder / "m.data"))


def test_constants_that_are_read_keep_no_file_mapped(tmp_path: Path) -> None:
    model = with_many_small_weights(tmp_path)
    read = [g.constant(value) for value in model.graph.initializers.values()]
    assert maps(tmp_path) == 0
    assert len(read) == 30
    for array in read:
        np.testing.assert_array_equal(array, np.full(9, 1.5, np.float32))


def test_tensors_that_are_written_inline_keep_no_file_mapped(tmp_path: Path) -> None:
    model = with_many_small_weights(tmp_path)
    write_model(model, tmp_path / "inline.onnx", None)
    assert maps(tmp_path) == 0
    written = ir.load(tmp_path / "inline.onnx").graph.initializers["w7"].const_value
    assert written is not None
    np.testing.assert_array_equal(written.numpy(), np.full(9, 1.5, np.float32))
