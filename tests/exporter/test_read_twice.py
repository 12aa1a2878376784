# SPDX-License-Identifier: Apache-2.0
"""Probabilities that several products read become an attention for each, or nothing is changed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import SIZES, attention, fuse, model, numbers
from exporter.torch_exports import run

from flash_export.find import find

W = ", float[B, 4, T, 6] w"
MORE = ", float[B, 4, S, 6] more"
CONSTANTS = graphs.CONSTANTS + ", float none = {0.0}"
SOFTMAX = graphs.PRODUCT + "p = Softmax <axis = -1> (scaled)\n"

SHARED = {
    "as they are": (SOFTMAX + "probs = Identity (p)\n", 2),
    "guarded against NaN": (SOFTMAX + "nan = IsNaN (p)\n probs = Where (nan, none, p)\n", 2),
    "guarded by zeros of their shape": (
        SOFTMAX + "nan = IsNaN (p)\n n = Shape (p)\n zeros = Expand (none, n)\n probs = Where (nan, zeros, p)\n",
        2,
    ),
    "by a third product": (SOFTMAX + "probs = Identity (p)\n", 3),
}


def feeds(sizes: dict[str, int], count: int) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    shape = (sizes["B"], 4, sizes["T"], 6)
    return [*numbers(sizes), *(random.standard_normal(shape).astype(np.float32) for _ in range(count - 1))]


@pytest.mark.parametrize("name", SHARED)
def test_each_product_is_an_attention_of_its_own(name: str) -> None:
    body, count = SHARED[name]
    body += "out = MatMul (probs, v)\n more = MatMul (probs, w)\n"
    third = count == 3
    proto = model(
        body + ("last = MatMul (probs, u)\n" if third else ""),
        inputs=graphs.QKV + W + (W.replace(" w", " u") if third else ""),
        outputs=graphs.OUT + MORE + (MORE.replace("more", "last") if third else ""),
        constants=CONSTANTS,
    )
    fused, sites = fuse(proto)
    assert [site.status for site in sites] == ["fused"] * count
    assert len({site.name for site in sites}) == count
    assert [n.op_type for n in fused.graph.node].count("FlashAttention") == count
    assert not {"Softmax", "MatMul", "IsNaN"} & {n.op_type for n in fused.graph.node}
    for sizes in SIZES:
        inputs = feeds(sizes, count)
        pairs = zip(*(run(file.SerializeToString(), inputs) for file in (proto, fused)), strict=True)
        for right, got in pairs:
            np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


def test_a_mask_is_read_for_each_of_them() -> None:
    proto = attention(
        "keep = LessOrEqual (j, i)\n masked = Where (keep, scaled, hidden)\n p = Softmax <axis = -1> (masked)\n"
        " more = MatMul (p, w)",
        inputs=graphs.QKV + W,
        outputs=graphs.OUT + MORE,
    )
    proto.graph.node[-2].input[0] = "masked"
    _, sites = fuse(proto)  # two softmaxes of one mask, as an exporter that finds no common parts writes them
    assert [graphs.causal(site) for site in sites] == ["top_left"] * 2


KEPT = {
    "an output as well": ("out = MatMul (p, v)\n more = MatMul (p, w)\n", ", float[B, 4, S, T] p"),
    "another operator": (
        "out = MatMul (p, v)\n more = MatMul (p, w)\n sum = ReduceSum (p)\n",
        ", float[1, 1, 1, 1] sum",
    ),
    "keys squared": ("out = MatMul (p, v)\n pp = Mul (p, p)\n more = MatMul (pp, w)\n", ""),
}


@pytest.mark.parametrize("name", KEPT)
def test_where_not_all_of_them_fuse_nothing_is_changed(name: str) -> None:
    body, outputs = KEPT[name]
    proto = model(SOFTMAX + body, inputs=graphs.QKV + W, outputs=graphs.OUT + MORE + outputs, constants=CONSTANTS)
    converted = ir.from_proto(proto)
    (site,) = find(converted)
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.code == "probabilities_used"
    assert [n.op_type for n in converted.graph] == [n.op_type for n in proto.graph.node]
