# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import nudge
from flash_export.runtime import Session

MODEL = """<ir_version: 9, opset_import: ["": 18]>
    g (int64[n] ids, float[n,2] x, int64[n] keep) => (float[n,2] rows, float[n,2] y, float[n] m)
    <float[3,2] table = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}>
    { rows = Gather(table, ids)  y = Add(rows, x)  m = Cast<to = 1>(keep) }"""
FEEDS = {"ids": np.array([2, 0]), "x": np.full((2, 2), 0.7, np.float32), "keep": np.array([1, 0])}


def outputs(k: int, folder: Path) -> list[np.ndarray]:
    model = ir.from_onnx_text(MODEL)
    session = Session(nudge.add_nudge(model), folder)
    return session.run(nudge.feeds(FEEDS, nudge.numbers(model), k), ["rows", "y", "m"])


def test_a_nudge_of_zero_changes_not_one_bit(tmp_path: Path) -> None:
    plain = Session(ir.from_onnx_text(MODEL), tmp_path).run(FEEDS)
    assert all(np.array_equal(a, b) for a, b in zip(outputs(0, tmp_path), plain, strict=True))


def test_embeddings_and_numbers_are_nudged_and_masks_and_indices_are_not(tmp_path: Path) -> None:
    by = nudge.factor(3)
    rows, y, m = outputs(3, tmp_path)
    np.testing.assert_array_equal(rows, np.array([[0.5, 0.6], [0.1, 0.2]], np.float32) * by)
    np.testing.assert_array_equal(y, rows + np.float32(0.7) * by)
    np.testing.assert_array_equal(m, [1.0, 0.0])


def test_the_smallest_float_stays_finite() -> None:
    assert all(np.isfinite(np.finfo(np.float32).min * nudge.factor(k)) for k in range(9))


def test_the_model_itself_is_left_alone() -> None:
    model = ir.from_onnx_text(MODEL)
    nudge.add_nudge(model)
    assert [node.op_type for node in model.graph] == ["Gather", "Add", "Cast"]
    assert len(model.graph.inputs) == 3
