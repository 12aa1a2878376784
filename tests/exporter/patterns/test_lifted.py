# SPDX-License-Identifier: Apache-2.0
"""``Max(scores, lowest)`` turns what is hidden for good into a fill, and is read where that is known to be so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from exporter import graphs

from flash_export import pipeline
from flash_export.options import Options
from flash_export.sites import Site
from flash_export.talk import Talk

INPUTS = graphs.QKV + ", bool[B, 1, S, T] see, float[B, 1, S, T] any"
CONSTANTS = graphs.CONSTANTS + ", float small = {-10000.0}"
MASKED = {
    "no mask": "hid = Identity (scaled)\n",
    "minus infinity by Where": "hid = Where (see, scaled, hidden)\n",
    "minus infinity added": "m = Where (see, zero, hidden)\n hid = Add (scaled, m)\n",
    "the lowest number added": "m = Where (see, zero, lowest)\n hid = Add (scaled, m)\n",
}


def export(folder: Path, mask: str, bound: str = "masked = Max (hid, lowest)\n") -> Site:
    """The only site, checked on a mask with a row of which every key is hidden."""
    body = graphs.PRODUCT + mask + bound + graphs.REST
    onnx.save(graphs.model(body, inputs=INPUTS, constants=CONSTANTS), folder / "in.onnx")
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((2, 4, s, 8)).astype(np.float32) for n, s in (("q", 5), ("k", 7), ("v", 7))}
    arrays["see"], arrays["any"] = rng.random((2, 1, 5, 7)) < 0.6, np.zeros((2, 1, 5, 7), np.float32)
    arrays["see"][1, 0, 2] = False
    np.savez(folder / "values.npz", **arrays)
    options = Options(source=folder / "in.onnx", output=folder / "out.onnx", values=folder / "values.npz")
    (site,) = pipeline.run(options, Talk(silent=True)).sites
    if site.status == "fused":
        assert not any(node.op_type == "Max" for node in onnx.load(folder / "out.onnx").graph.node)
    return site


@pytest.mark.parametrize("bound", ["masked = Max (hid, lowest)\n", "masked = Max (lowest, hid)\n"])
@pytest.mark.parametrize("mask", MASKED)
def test_one_mask_below_a_lowest_number_is_a_fill(mask: str, bound: str, tmp_path: Path) -> None:
    assert export(tmp_path, MASKED[mask], bound).status == "fused"


def test_a_row_of_hidden_keys_is_the_mean_of_v(tmp_path: Path) -> None:
    assert export(tmp_path, MASKED["minus infinity by Where"]).status == "fused"
    arrays = dict(np.load(tmp_path / "values.npz"))
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    taken = {v.name for v in session.get_inputs()}
    (out,) = session.run(None, {name: array for name, array in arrays.items() if name in taken})
    assert np.allclose(out[1, :, 2], arrays["v"][1].mean(axis=1), atol=1e-6)


UNKNOWN = {
    "two masks": "m = Where (see, zero, lowest)\n one = Add (scaled, m)\n hid = Add (one, any)\n",
    "a tensor": "hid = Add (scaled, any)\n",
}


@pytest.mark.parametrize("mask", UNKNOWN)
def test_masks_that_may_be_lifted_in_part_are_refused(mask: str, tmp_path: Path) -> None:
    site = export(tmp_path, UNKNOWN[mask])
    assert site.reason is not None
    assert site.reason.code == "mask_replaces_scores"
    assert "Max lifts masked scores" in site.reason.text


@pytest.mark.parametrize("bound", ["masked = Max (hid, small)\n", "masked = Max (hid, any)\n"])
def test_a_bound_that_may_lift_a_score_is_no_part_of_attention(bound: str, tmp_path: Path) -> None:
    site = export(tmp_path, MASKED["minus infinity by Where"], bound)
    assert site.reason is not None
    assert site.reason.code == "unknown_operator"
