# SPDX-License-Identifier: Apache-2.0
"""Attention written as Einsum: grouped heads as axes of their own, ellipses, axes in any order; held to NumPy's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter.graphs import code, fuse, model, only
from exporter.torch_exports import run

from flash_export.einsum import letters
from flash_export.errors import EXIT_USAGE

SIZES = {"B": 2, "S": 5, "T": 7}
CAUSAL = (
    "q_shape = Shape (q)\n k_shape = Shape (k)\n rows = Gather <axis = 0> (q_shape, i1)\n"
    "columns = Gather <axis = 0> (k_shape, i1)\n row = Range (i0, rows, i1)\n column = Range (i0, columns, i1)\n"
    "i = Unsqueeze (row, ax1)\n j = Unsqueeze (column, ax0)\n seen = LessOrEqual (j, i)\n"
    "masked = Where (seen, scaled, hidden)\n"
)


def attention(first: str, second: str, mask: str = "") -> str:
    """The body of attention by these two equations."""
    last = "masked" if mask else "scaled"
    return (
        f'scores = Einsum <equation = "{first}"> (q, k)\n scaled = Mul (scores, scale)\n{mask}'
        f'probs = Softmax <axis = -1> ({last})\n out = Einsum <equation = "{second}"> (probs, v)\n'
    )


def arrays(*dims: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [[SIZES[d] if d in SIZES else int(d) for d in text.split(", ")] for text in dims]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def expected(first: str, second: str, inputs: list[np.ndarray], *, causal: tuple[int, int] | None = None) -> np.ndarray:
    """softmax(0.5 * first) . V by ``second`` in float64; ``causal`` are the axes of queries and keys in the scores."""
    q, k, v = (x.astype(np.float64) for x in inputs)
    scores = 0.5 * np.einsum(first, q, k)
    if causal is not None:
        shape = [1] * scores.ndim
        lengths = [scores.shape[axis] for axis in causal]
        for axis, length in zip(causal, lengths, strict=True):
            shape[axis] = length
        hidden = np.triu(np.ones(lengths, bool), 1)
        hidden = hidden if causal[0] < causal[1] else hidden.T
        scores = np.where(hidden.reshape(shape), -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum(second, weights / weights.sum(-1, keepdims=True), v)


FORMS = {
    "grouped": ("bqghd,bkgd->bghqk", "bghqk,bkgd->bqghd", "B, S, 2, 3, 8", "B, T, 2, 8", "B, S, 2, 3, 8", 6, 2),
    "grouped, queries before groups": (
        "bqghd,bkgd->bqghk",
        "bqghk,bkgd->bqghd",
        "B, S, 2, 3, 8",
        "B, T, 2, 8",
        "B, S, 2, 3, 8",
        6,
        2,
    ),
    "grouped, heads first": (
        "bghqd,bgkd->bghqk",
        "bghqk,bgkd->bghqd",
        "B, 2, 3, S, 8",
        "B, 2, T, 8",
        "B, 2, 3, S, 8",
        6,
        2,
    ),
    "grouped, of fixed lengths": (
        "bqghd,bkgd->bghqk",
        "bghqk,bkgd->bqghd",
        "2, 3, 2, 4, 8",
        "2, 5, 2, 8",
        "2, 3, 2, 4, 8",
        8,
        2,
    ),
    "grouped, one query": (
        "bqghd,bkgd->bghqk",
        "bghqk,bkgd->bqghd",
        "B, 1, 2, 3, 8",
        "B, T, 2, 8",
        "B, 1, 2, 3, 8",
        6,
        2,
    ),
    "one head of keys": ("bqhd,bkd->bhqk", "bhqk,bkd->bqhd", "B, S, 4, 8", "B, T, 8", "B, S, 4, 8", 4, 1),
    "one head of keys, of fixed lengths": (
        "bqhd,bkd->bhqk",
        "bhqk,bkd->bqhd",
        "2, 5, 4, 8",
        "2, 7, 8",
        "2, 5, 4, 8",
        4,
        1,
    ),
    "ellipsis": ("...qd,...kd->...qk", "...qk,...kd->...qd", "B, 4, S, 8", "B, 4, T, 8", "B, 4, S, 8", 4, 4),
    "ellipsis on one side": ("bhqd,bh...d->bhq...", "bhqk,bhkd->bhqd", "B, 4, S, 8", "B, 4, T, 8", "B, 4, S, 8", 4, 4),
    "no arrow": ("id,jd", "ij,jz", "S, 8", "T, 8", "S, 8", 1, 1),
    "no query axis": ("bhd,bhkd->bhk", "bhk,bhkd->bhd", "B, 4, 8", "B, 4, T, 8", "B, 4, 8", 4, 4),
    "heads summed as well": ("bqhd,bkhd->bqk", "bqk,bkhd->bqhd", "B, S, 4, 8", "B, T, 4, 8", "B, S, 4, 8", 1, 1),
    "queries of two axes": (
        "bxyhd,bkhd->bhxyk",
        "bhxyk,bkhd->bxyhd",
        "B, 3, 5, 4, 8",
        "B, T, 4, 8",
        "B, 3, 5, 4, 8",
        4,
        4,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_fused_and_gives_the_same_numbers(name: str) -> None:
    first, second, query, key, out, q_heads, kv_heads = FORMS[name]
    inputs = f"float[{query}] q, float[{key}] k, float[{key}] v"
    proto = model(attention(first, second), inputs=inputs, outputs=f"float[{out}] out")
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert (site.attributes.q_num_heads, site.attributes.kv_num_heads) == (q_heads, kv_heads)
    numbers = arrays(query, key, key)
    (got,) = run(fused.SerializeToString(), numbers)
    np.testing.assert_allclose(got, expected(first, second, numbers), atol=3e-6, rtol=0)


def test_grouped_heads_keep_their_causal_mask() -> None:
    first, second, query, key, out, *_ = FORMS["grouped"]
    inputs = f"float[{query}] q, float[{key}] k, float[{key}] v"
    proto = model(attention(first, second, CAUSAL), inputs=inputs, outputs=f"float[{out}] out")
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.attributes is not None
    assert (site.attributes.causal, site.attributes.diagonal, site.bias_shape) == (1, 0, None)
    numbers = arrays(query, key, key)
    (got,) = run(fused.SerializeToString(), numbers)
    np.testing.assert_allclose(got, expected(first, second, numbers, causal=(3, 4)), atol=3e-6, rtol=0)


def test_keys_may_be_the_left_operand() -> None:
    body = (
        'scores = Einsum <equation = "bkgd,bqghd->bghqk"> (k, q)\n scaled = Mul (scores, scale)\n'
        'probs = Softmax <axis = -1> (scaled)\n out = Einsum <equation = "bkgd,bghqk->bqghd"> (v, probs)\n'
    )
    _, _, query, key, out, *_ = FORMS["grouped"]
    fused, sites = fuse(
        model(body, inputs=f"float[{query}] q, float[{key}] k, float[{key}] v", outputs=f"float[{out}] out")
    )
    assert only(sites).status == "fused"
    numbers = arrays(query, key, key)
    (got,) = run(fused.SerializeToString(), numbers)
    want = expected("bqghd,bkgd->bghqk", "bghqk,bkgd->bqghd", numbers)
    np.testing.assert_allclose(got, want, atol=3e-6, rtol=0)


def test_a_softmax_over_the_queries_is_no_attention_of_keys() -> None:
    body = attention("bqghd,bkgd->bghkq", "bghkq,bkgd->bqghd")
    _, _, query, key, out, *_ = FORMS["grouped"]
    assert code(
        model(body, inputs=f"float[{query}] q, float[{key}] k, float[{key}] v", outputs=f"float[{out}] out")
    ) == ("softmax_axis")


@pytest.mark.parametrize(
    ("first", "key"),
    [("bhqd,bhke->bhqk", "B, 4, T, 8"), ("bhqd,bhddk->bhqk", "B, 4, 8, 8, T")],
    ids=["summed in one operand", "diagonal"],
)
def test_other_equations_are_refused_with_the_equation(first: str, key: str) -> None:
    body = attention(first, "bhqk,bhkd->bhqd")
    inputs = f"float[B, 4, S, 8] q, float[{key}] k, float[B, 4, T, 8] v"
    _, sites = fuse(model(body, inputs=inputs, outputs="float[B, 4, S, 8] out"))
    reason = only(sites).reason
    assert reason is not None
    assert (reason.code, first in reason.text) == ("product_form", True)


def test_an_einsum_of_three_operands_is_refused_by_its_own_name() -> None:
    body = attention("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd").replace('bhqk"> (q, k)', 'bhqk"> (q, k, scale)')
    body = body.replace("bhqd,bhkd->bhqk", "bhqd,bhkd,->bhqk")
    inputs = "float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v"
    _, sites = fuse(model(body, inputs=inputs, outputs="float[B, 4, S, 8] out"))
    reason = only(sites).reason
    assert reason is not None
    assert (reason.code, reason.text) == ("product_form", "Einsum multiplies 3 tensors at once")


def test_keys_that_a_batch_shares_are_to_be_expanded() -> None:
    body = attention("bhqd,hkd->bhqk", "bhqk,bhkd->bhqd")
    inputs = "float[B, 4, S, 8] q, float[4, T, 8] k, float[B, 4, T, 8] v"
    _, sites = fuse(model(body, inputs=inputs, outputs="float[B, 4, S, 8] out"))
    reason = only(sites).reason
    assert reason is not None
    assert (reason.code, "expand K and V" in reason.action) == ("operand_shapes", True)


@pytest.mark.parametrize(
    ("equation", "sizes"),
    [
        ("...qd, ...kd -> ...qk", ((2, 3, 5, 8), (7, 8))),
        ("...qd,...kd->q...k", ((3, 5, 8), (2, 3, 7, 8))),
        ("bq...,bk...->bqk", ((2, 5, 3, 8), (2, 7, 3, 8))),
        ("zq,za", ((5, 3), (5, 4))),
        ("a...,aB", ((5, 3, 4), (5, 6))),
    ],
)
def test_equations_mean_what_numpy_takes_them_for(equation: str, sizes: tuple[tuple[int, ...], ...]) -> None:
    node = ir.node("Einsum", [None, None], {"equation": equation})
    found = letters(node, [len(shape) for shape in sizes])
    operands = [np.zeros(shape) for shape in sizes]
    try:
        wanted = np.einsum(equation, *operands).shape
    except ValueError:
        assert found is None
        return
    assert found is not None
    terms, out = found
    of = {name: size for term, shape in zip(terms, sizes, strict=True) for name, size in zip(term, shape, strict=True)}
    assert tuple(of[name] for name in out) == wanted


def test_values_of_an_empty_batch_end_as_a_usage_error(tmp_path: Path) -> None:
    """In a process of its own: ONNX Runtime's Einsum ends it with SIGFPE at a length of 0."""
    first, second, query, key, out, *_ = FORMS["grouped"]
    inputs = f"float[{query}] q, float[{key}] k, float[{key}] v"
    onnx.save(model(attention(first, second), inputs=inputs, outputs=f"float[{out}] out"), tmp_path / "m.onnx")
    q, k = np.zeros((0, 5, 2, 3, 8), np.float32), np.zeros((0, 7, 2, 8), np.float32)
    np.savez(tmp_path / "values.npz", q=q, k=k, v=k)
    command = [sys.executable, "-m", "flash_export", str(tmp_path / "m.onnx"), "--values", str(tmp_path / "values.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "q is empty" in done.stderr) == (EXIT_USAGE, True), done.stderr
