# SPDX-License-Identifier: Apache-2.0
"""A factor of the scores' rows is multiplied into Q only where the product of Q and K has all of its axes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from exporter.graphs import PRODUCT, REST, both, fuse, model, only

from flash_export.find import find

RANDOM = np.random.default_rng(9)


@pytest.mark.parametrize(
    ("factor", "query", "rows"),
    [
        ("1, 3, 1, 1", "B, 1, S, 8", "S"),
        ("B, 3, S, 1", "B, 1, S, 8", "S"),
        ("3, 1, 1", "B, 1, S, 8", "S"),
        ("B, H, 1, 1", "B, 1, S, 8", "S"),
        ("1, 1, N, 1", "B, 1, 1, 8", "N"),
    ],
)
def test_a_factor_that_makes_more_scores_is_refused(factor: str, query: str, rows: str) -> None:
    heads = "H" if "H" in factor else "3" if "3" in factor else "1"
    proto = model(
        PRODUCT + "masked = Mul (scaled, f)\n" + REST,
        inputs=f"float[{query}] q, float[B, 1, T, 8] k, float[B, {heads}, T, 8] v, float[{factor}] f",
        outputs=f"float[B, {heads}, {rows}, 8] out",
    )
    reason = only(find(ir.from_proto(proto))).reason
    assert reason is not None
    assert reason.code == "scale_not_scalar"
    assert "makes more of them" in reason.text
    assert "where the scores have length 1" in reason.text


@pytest.mark.parametrize(
    ("factor", "query", "sizes"),
    [
        ("1, 3, 1, 1", "B, 1, S, 8", (1, 3, 1, 1)),
        ("B, 3, S, 1", "B, 1, S, 8", (2, 3, 5, 1)),
        ("B, 1, 1, 1", "1, 3, S, 8", (2, 1, 1, 1)),
        ("3, 1, 1", "1, 1, S, 8", (3, 1, 1)),
    ],
)
def test_a_factor_may_be_longer_than_q_where_k_is(factor: str, query: str, sizes: tuple[int, ...]) -> None:
    proto = model(
        PRODUCT + "masked = Mul (scaled, f)\n" + REST,
        inputs=f"float[{query}] q, float[B, 3, T, 8] k, float[B, 3, T, 8] v, float[{factor}] f",
        outputs="float[B, 3, S, 8] out",
    )
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    lengths = [{"B": 2, "S": 5}.get(name, name) for name in query.split(", ")]
    shapes = [[int(length) for length in lengths], [2, 3, 7, 8], [2, 3, 7, 8], sizes]
    given = [RANDOM.standard_normal(shape).astype(np.float32) for shape in shapes]
    expected, got = both(proto, fused, given)
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)
