# SPDX-License-Identifier: Apache-2.0
"""A mask for each window of an image reaches the node where images and windows are one batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from exporter import graphs
from exporter.torch_exports import run

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


MERGED = "".join(
    f"{n}m = Reshape ({n}, tokens)\n {n}a = Sigmoid ({n}m)\n {n}s = Reshape ({n}a, split)\n"
    f" {n}w = Transpose <perm = [0, 2, 1, 3]> ({n}s)\n"
    for n in "qkv"
)
ANY_WINDOWS = (
    "qd = Shape <start = 0, end = 2> (q)\n tail = Slice (images, at2, at5, ax0)\n"
    "images_now = Concat <axis = 0> (qd, tail)\n"
)


@pytest.mark.parametrize("sizes", [(2, 6), (3, 1), (1, 4), (0, 4), (2, 0)])
def test_images_and_windows_may_both_be_any_number(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """The number of images is that of all windows by that of an image's, which the mask alone tells."""
    scores = SCORES.replace("Reshape (related, images)", "Reshape (related, images_now)")
    proto = graphs.model(
        ANY_WINDOWS + MERGED + scores + MASKS["one added"] + REST,
        inputs=f"{INPUTS.replace('B, 4', 'B, W')}, float[1, W, 1, 6, 6] m, float[1, 3, 6, 6] relative",
        outputs="float[N, 3, 6, 8] out",
        constants=CONSTANTS + ", int64[1] at2 = {2}, int64[1] at5 = {5}",
    )
    fused, sites = graphs.fuse(proto)
    assert graphs.only(sites).status == "fused", graphs.only(sites).reason
    random = np.random.default_rng(0)
    shapes = [(*sizes, 3, 6, 8)] * 3 + [(1, sizes[1], 1, 6, 6), (1, 3, 6, 6)]
    arrays = [random.standard_normal(shape, np.float32) for shape in shapes]
    if 0 in sizes:
        assert run(fused.SerializeToString(), arrays)[0].size == 0
        return
    right, got = graphs.both(proto, fused, arrays)
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)


def test_a_mask_of_the_whole_batch_is_handed_over_as_it_is(tmp_path: Path) -> None:
    assert export(tmp_path, SPLIT, "one added", "float[B, 4, 1, 6, 6] m").status == "fused"
    assert not [n for n in onnx.load(tmp_path / "out.onnx").graph.node if n.op_type == "Expand"]
