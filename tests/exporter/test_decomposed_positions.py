# SPDX-License-Identifier: Apache-2.0
"""A bias of the keys' rows added to one of their columns, keys being on a grid: both reach the node at full length.

The bias of each depends on the query, as in MViTv2 (Li et al. 2022, arXiv:2112.01526, equation 4).
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exporter import graphs
from exporter.torch_exports import run

Q_GRID, K_GRID = (2, 3), (5, 4)
"""Rows and columns of the queries and of the keys."""

HEADS = {"merged with the batch": "", "an axis of their own": "3, "}
CONSTANTS = graphs.CONSTANTS + (
    ", int64[5] grid = {-1, 2, 3, 5, 4}, int64[3] flat = {-1, 6, 20}, int64[6] grid_heads = {-1, 3, 2, 3, 5, 4},"
    " int64[4] flat_heads = {-1, 3, 6, 20}, int64[1] last = {-1}, int64[1] before = {-2}"
)
ADDED = {
    "rows and columns": "r = Unsqueeze (rows, last)\n c = Unsqueeze (columns, before)\n"
    "once = Add (apart, r)\n seen = Add (once, c)\n",
    "rows alone": "r = Unsqueeze (rows, last)\n seen = Add (apart, r)\n",
    "columns hidden": (
        "c = Unsqueeze (columns, before)\n off = Greater (c, scale)\n seen = Where (off, lowest, apart)\n"
    ),
}


def decomposed(heads: str, added: str) -> onnx.ModelProto:
    own, form = HEADS[heads], "_heads" if HEADS[heads] else ""
    perm = "0, 1, 3, 2" if own else "0, 2, 1"
    return graphs.model(
        f"kt = Transpose <perm = [{perm}]> (k)\n scores = MatMul (q, kt)\n scaled = Mul (scores, scale)\n"
        f"apart = Reshape (scaled, grid{form})\n{ADDED[added]} merged = Reshape (seen, flat{form})\n"
        "probs = Softmax <axis = -1> (merged)\n out = MatMul (probs, v)\n",
        inputs=f"float[N, {own}6, 8] q, float[N, {own}20, 8] k, float[N, {own}20, 8] v, "
        f"float[N, {own}2, 3, 5] rows, float[N, {own}2, 3, 4] columns",
        outputs=f"float[N, {own}6, 8] out",
        constants=CONSTANTS,
    )


def expected(arrays: list[np.ndarray], added: str) -> np.ndarray:
    """The same in float64."""
    q, k, v, rows, columns = (x.astype(np.float64) for x in arrays)
    scores = (0.5 * q @ k.swapaxes(-1, -2)).reshape(*q.shape[:-2], *Q_GRID, *K_GRID)
    if added == "columns hidden":
        scores = np.where(columns[..., None, :] > 0.5, -3.4028234663852886e38, scores)
    else:
        scores = scores + rows[..., None]
        scores = scores + columns[..., None, :] if added == "rows and columns" else scores
    scores = scores.reshape(*q.shape[:-1], 20)
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("heads", HEADS)
def test_a_bias_along_a_part_of_the_keys_is_expanded_to_all_of_them(heads: str, added: str) -> None:
    fused, sites = graphs.fuse(decomposed(heads, added))
    site = graphs.only(sites)
    assert site.status == "fused", site.reason
    for seed, number in enumerate((1, 3, 7, 0)):
        rng = np.random.default_rng(seed)
        own = (3,) if HEADS[heads] else ()
        shapes = [(6, 8), (20, 8), (20, 8), (*Q_GRID, K_GRID[0]), (*Q_GRID, K_GRID[1])]
        arrays = [rng.standard_normal((number, *own, *shape)).astype(np.float32) for shape in shapes]
        (got,) = run(fused.SerializeToString(), arrays)
        np.testing.assert_allclose(got, expected(arrays, added), atol=3e-6, rtol=0)


def test_heads_merged_with_the_batch_keep_their_own_bias() -> None:
    (_, sites) = graphs.fuse(decomposed("merged with the batch", "rows and columns"))
    site = graphs.only(sites)
    assert site.bias_shape == ["N", 1, 6, 20]
