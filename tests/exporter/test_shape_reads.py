# SPDX-License-Identifier: Apache-2.0
"""Who reads only the lengths of scores or probabilities does not keep them; who reads their numbers does."""

from __future__ import annotations

import numpy as np
import pytest
from exporter.graphs import OUT, PLAIN, PRODUCT, QKV, code, fuse, model, numbers, only
from exporter.torch_exports import run

from flash_export.op import DOMAIN

MERGED = (
    "eight = Constant <value = int64[1] {8}> ()\n minus = Constant <value = int64[1] {-1}> ()\n"
    "ls = Shape <start = 2, end = 3> (q)\n lt = Shape <start = 2, end = 3> (k)\n"
    "mq = Concat <axis = 0> (minus, ls, eight)\n mk = Concat <axis = 0> (minus, lt, eight)\n"
    "qm = Reshape (q, mq)\n km = Reshape (k, mk)\n vm = Reshape (v, mk)\n"
    "kt = Transpose <perm = [0, 2, 1]> (km)\n scores = MatMul (qm, kt)\n scaled = Mul (scores, scale)\n"
    "probs = Softmax <axis = -1> (scaled)\n om = MatMul (probs, vm)\n apart = Shape (q)\n out = Reshape (om, apart)\n"
)
READERS = {
    "of_probabilities": (PLAIN + "n = Shape (probs)\n", "int64[4] n"),
    "of_scores": (PLAIN + "n = Shape (scores)\n", "int64[4] n"),
    "of_both": (PLAIN + "a = Shape (scores)\n b = Shape (probs)\n n = Concat <axis = 0> (a, b)\n", "int64[8] n"),
    "of_one_axis": (PLAIN + "n = Shape <start = 2, end = 3> (probs)\n", "int64[1] n"),
    "of_the_last_axis": (PLAIN + "n = Shape <start = -1> (scaled)\n", "int64[1] n"),
    "number_of_elements": (PLAIN + "n = Size (probs)\n", "int64 n"),
    "of_merged_heads": (MERGED + "n = Shape (probs)\n", "int64[3] n"),
    "of_a_view": (
        PLAIN + "two = Constant <value = int64[3] {0, -1, 0}> ()\n turned = Transpose <perm = [0, 3, 2, 1]> (scaled)\n"
        "flat = Reshape (turned, two)\n n = Shape (flat)\n",
        "int64[3] n",
    ),
    "as_a_mask's_size": (
        PRODUCT + "sizes = Shape (scaled)\n ones = ConstantOfShape (sizes)\n noise = CumSum (ones, i2)\n"
        "masked = Add (scaled, noise)\n probs = Softmax <axis = -1> (masked)\n out = MatMul (probs, v)\n"
        "n = Identity (sizes)\n",
        "int64[4] n",
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_lengths_are_taken_from_q_and_k(name: str) -> None:
    body, extra = READERS[name]
    proto = model(body, outputs=f"{OUT}, {extra}")
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    assert sum(n.domain == DOMAIN for n in fused.graph.node) == 1
    for sizes in ({"B": 2, "S": 5, "T": 7}, {"B": 1, "S": 1, "T": 3}):
        arrays = numbers(sizes)
        right, got = run(proto.SerializeToString(), arrays), run(fused.SerializeToString(), arrays)
        np.testing.assert_allclose(got[0], right[0], atol=2e-6, rtol=0)
        np.testing.assert_array_equal(got[1], right[1])


def test_numbers_that_are_read_still_keep_the_attention() -> None:
    probabilities = model(
        PLAIN + "n = Shape (probs)\n m = ReduceMax (probs)\n", outputs=f"{OUT}, int64[4] n, float[1,1,1,1] m"
    )
    scores = model(PLAIN + "n = Size (scores)\n m = ReduceMax (scaled)\n", outputs=f"{OUT}, int64 n, float[1,1,1,1] m")
    assert (code(probabilities), code(scores)) == ("probabilities_used", "scores_used")
    view = "t = Transpose (scaled)\n n = Shape (t)\n m = ReduceMax (t)\n"
    assert code(model(PLAIN + view, outputs=f"{OUT}, int64[4] n, float[1,1,1,1] m")) == "scores_used"


def test_q_k_and_v_may_come_in_any_order() -> None:
    """V is made after the scores, and their lengths are read before: the answer stands above both."""
    body = (
        PRODUCT + "n = Shape (scores)\n flat = ReduceProd <keepdims = 0> (n)\n w = Neg (v)\n"
        "probs = Softmax <axis = -1> (scaled)\n out = MatMul (probs, w)\n"
    )
    proto = model(body, inputs=QKV, outputs=f"{OUT}, int64 flat")
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    arrays = numbers({"B": 2, "S": 5, "T": 7})
    for ours, theirs in zip(
        run(fused.SerializeToString(), arrays), run(proto.SerializeToString(), arrays), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-6, rtol=0)
