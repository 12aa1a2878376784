# SPDX-License-Identifier: Apache-2.0
"""A factor of the scores' rows is multiplied into Q where an Einsum has Q's axes in another order than the scores'."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter.graphs import both, fuse, model, only

from flash_export.find import find

RANDOM = np.random.default_rng(4)
SIZES = {"b": 2, "q": 5, "k": 7, "h": 6, "g": 2, "r": 3, "d": 4, "v": 4, "l": 1}
FORMS = [
    ("bqhd", "bkhd", "bhqk", "bkhv", "bqhv", "hll"),
    ("bqhd", "bkhd", "bhqk", "bkhv", "bqhv", "bhql"),
    ("bqdh", "bkhd", "bhqk", "bkhv", "bqhv", "hll"),
    ("qbhd", "kbhd", "bhqk", "bkhv", "bqhv", "bhll"),
    ("bqgrd", "bkgd", "bgrqk", "bkgv", "bqgrv", "grll"),
    ("bqrgd", "bkgd", "bgrqk", "bkgv", "bqgrv", "bgrql"),
]


def _shape(letters: str) -> list[int | str]:
    names = {"b": "B", "q": "S", "k": "T"}
    return [names.get(letter, SIZES[letter]) for letter in letters]


def _declared(letters: str) -> str:
    return f"float[{', '.join(map(str, _shape(letters)))}]"


def _model(
    query: str, key: str, scores: str, value: str, out: str, factor: str, *, key_first: bool = False
) -> onnx.ModelProto:
    product = f'"{key},{query}->{scores}"> (k, q)' if key_first else f'"{query},{key}->{scores}"> (q, k)'
    body = (
        f"scores = Einsum <equation = {product}\n scaled = Mul (scores, f)\n"
        f"probs = Softmax <axis = -1> (scaled)\n"
        f'out = Einsum <equation = "{scores},{value}->{out}"> (probs, v)\n'
    )
    inputs = f"{_declared(query)} q, {_declared(key)} k, {_declared(value)} v, {_declared(factor)} f"
    return model(body, inputs=inputs, outputs=f"{_declared(out)} out")


@pytest.mark.parametrize("key_first", [False, True], ids=["q, k", "k, q"])
@pytest.mark.parametrize(("query", "key", "scores", "value", "out", "factor"), FORMS)
def test_a_factor_of_heads_or_rows_is_multiplied_into_q(
    query: str, key: str, scores: str, value: str, out: str, factor: str, key_first: bool
) -> None:
    proto = _model(query, key, scores, value, out, factor, key_first=key_first)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    shapes = [[SIZES[letter] for letter in letters] for letters in (query, key, value, factor)]
    given = [RANDOM.standard_normal(shape).astype(np.float32) for shape in shapes]
    expected, got = both(proto, fused, given)
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_a_factor_of_an_axis_that_only_k_has_is_refused() -> None:
    proto = _model("bqd", "bkhd", "bhqk", "bkhv", "bqhv", "hll")
    reason = only(find(ir.from_proto(proto))).reason
    assert reason is not None
    assert reason.code == "scale_not_scalar"
    assert "whose axes are not those of Q" in reason.text
