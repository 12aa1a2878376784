# SPDX-License-Identifier: Apache-2.0
"""A mask for each window of an image reaches the node where images and windows are one batch."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from exporter import graphs

from flash_export import pipeline
from flash_export.options import Options
from flash_export.sites import Site
from flash_export.talk import Talk

INPUTS = "float[B, 4, 3, 6, 8] q, float[B, 4, 3, 6, 8] k, float[B, 4, 3, 6, 8] v"
CONSTANTS = graphs.CONSTANTS + (
    ", int64[4] windows = {-1, 3, 6, 8}, int64[5] images = {-1, 4, 3, 6, 6}, int64[4] flat = {-1, 3, 6, 6},"
    " int64[1] last = {-1}, int64[3] tokens = {-1, 6, 24}, int64[4] split = {0, 0, 3, 8}, float half = {0.5},"
    " float low = {-100.0}"
)
SPLIT = "qw = Reshape (q, windows)\n kw = Reshape (k, windows)\n vw = Reshape (v, windows)\n"
PROJECTED = (
    "qt = Reshape (q, tokens)\n act = Sigmoid (qt)\n qs = Reshape (act, split)\n"
    "qw = Transpose <perm = [0, 2, 1, 3]> (qs)\n kw = Reshape (k, windows)\n vw = Reshape (v, windows)\n"
)
SCORES = (
    "kt = Transpose <perm = [0, 1, 3, 2]> (kw)\n scores = MatMul (qw, kt)\n scaled = Mul (scores, scale)\n"
    "related = Add (scaled, relative)\n apart = Reshape (related, images)\n"
)
REST = "merged = Reshape (masked, flat)\n probs = Softmax <axis = -1> (merged)\n out = MatMul (probs, vw)\n"
MASKS = {
    "one added": "masked = Add (apart, m)\n",
    "added twice": "once = Add (apart, m)\n masked = Add (once, m)\n",
    "by Where": "off = Greater (m, half)\n masked = Where (off, hidden, apart)\n",
}


def export(folder: Path, split: str, mask: str, window: str = "float[1, 4, 1, 6, 6] m") -> Site:
    proto = graphs.model(
        split + SCORES + MASKS[mask] + REST,
        inputs=f"{INPUTS}, {window}, float[1, 3, 6, 6] relative",
        outputs="float[W, 3, 6, 8] out",
        constants=CONSTANTS,
    )
    onnx.save(proto, folder / "in.onnx")
    options = Options(source=folder / "in.onnx", output=folder / "out.onnx")
    (site,) = pipeline.run(options, Talk(silent=True)).sites
    return site


@pytest.mark.parametrize("split", [SPLIT, PROJECTED], ids=["batch at hand", "batch merged"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_each_window_is_expanded_over_the_images(mask: str, split: str, tmp_path: Path) -> None:
    site = export(tmp_path, split, mask)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert site.attributes.q_num_heads == 3
    graph = onnx.load(tmp_path / "out.onnx").graph
    read = {name for node in graph.node for name in node.input} | {v.name for v in graph.output}
    assert all(set(node.output) & read or node.domain for node in graph.node)  # nothing is left that nobody reads


def test_a_mask_of_the_whole_batch_is_handed_over_as_it_is(tmp_path: Path) -> None:
    assert export(tmp_path, SPLIT, "one added", "float[B, 4, 1, 6, 6] m").status == "fused"
    assert not [n for n in onnx.load(tmp_path / "out.onnx").graph.node if n.op_type == "Expand"]
