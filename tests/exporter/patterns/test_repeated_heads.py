# SPDX-License-Identifier: Apache-2.0
"""K and V that repeat their heads in different orders are no groups, and fused all the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exporter.graphs import both, fuse, model, only

CONSTANTS = (
    "int64[1] ax0 = {0}, int64[1] ax1 = {1}, int64[1] ax2 = {2}, int64[1] ax3 = {3}, int64[1] six = {6}, "
    "int64[1] eight = {8}, int64[2] inner = {2, 3}, int64[2] outer = {3, 2}, float scale = {0.5}"
)


def repeated(name: str, inner: bool) -> str:
    order, axis = ("inner", "ax2") if inner else ("outer", "ax1")
    return (
        f"s{name} = Shape ({name}2)\n b{name} = Slice (s{name}, ax0, ax1)\n t{name} = Slice (s{name}, ax2, ax3)\n"
        f"u{name} = Unsqueeze ({name}2, {axis})\n w{name} = Concat <axis = 0> (b{name}, {order}, t{name}, eight)\n"
        f"e{name} = Expand (u{name}, w{name})\n j{name} = Concat <axis = 0> (b{name}, six, t{name}, eight)\n"
        f"{name} = Reshape (e{name}, j{name})\n"
    )


def attention(key: bool, value: bool) -> onnx.ModelProto:
    lines = "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n s = MatMul (q, kt)\n scaled = Mul (s, scale)\n"
    return model(
        repeated("k", key) + repeated("v", value) + lines + "p = Softmax <axis = -1> (scaled)\n out = MatMul (p, v)\n",
        inputs="float[B, 6, S, 8] q, float[B, 2, T, 8] k2, float[B, 2, T, 8] v2",
        outputs="float[B, 6, S, 8] out",
        constants=CONSTANTS,
    )


@pytest.mark.parametrize(
    ("key", "value", "kv_heads"), [(True, True, 2), (True, False, 6), (False, True, 6), (False, False, 6)]
)
def test_heads_that_are_repeated_inside_or_outside_are_read(key: bool, value: bool, kv_heads: int) -> None:
    proto = attention(key, value)
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.attributes is not None, site.reason
    assert (site.attributes.q_num_heads, site.attributes.kv_num_heads) == (6, kv_heads)
    random = np.random.default_rng(8)
    for b, s, t in ((2, 3, 5), (1, 4, 4)):
        given = [random.standard_normal(x).astype(np.float32) for x in ((b, 6, s, 8), (b, 2, t, 8), (b, 2, t, 8))]
        expected, got = both(proto, fused, given)
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)
