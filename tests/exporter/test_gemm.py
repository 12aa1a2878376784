# SPDX-License-Identifier: Apache-2.0
"""Attention without a batch whose products are Gemm, as PyTorch's legacy exporter writes torch.mm, is fused."""

from __future__ import annotations

import numpy as np
import pytest
from exporter.graphs import code, fuse, model, only
from exporter.torch_exports import run

INPUTS = "float[S, 8] q, float[T, 8] k, float[T, 6] v"
OUT = "float[S, 6] out"
ROWS, COLUMNS = 5, 7


def operands(rows: int = ROWS, columns: int = COLUMNS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in ((rows, 8), (columns, 8), (columns, 6))]


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, bias: np.ndarray | float = 0.0) -> np.ndarray:
    scores = scale * (q.astype(np.float64) @ k.astype(np.float64).T) + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


FORMS = {
    "transposed": ("s = Gemm <transB = 1> (q, k)\n", "out = Gemm (p, v)\n", 1.0),
    "scaled": ("s = Gemm <transB = 1, alpha = 0.25> (q, k)\n", "out = Gemm <alpha = 1.0> (p, v)\n", 0.25),
    "nothing added": ("s = Gemm <transB = 1, beta = 0.0> (q, k, scale)\n", "out = Gemm (p, v, zero)\n", 1.0),
    "columns first": (
        "qt = Transpose <perm = [1, 0]> (q)\n s = Gemm <transA = 1, transB = 1> (qt, k)\n",
        "out = MatMul (p, v)\n",
        1.0,
    ),
    "keys first": (
        "st = Gemm <transB = 1> (k, q)\n s = Transpose <perm = [1, 0]> (st)\n",
        "out = Gemm (p, v)\n",
        1.0,
    ),
    "weighted": ("s = Gemm <transB = 1> (q, k)\n", "two = Gemm <alpha = 2.0> (p, v)\n out = Mul (two, scale)\n", 1.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_products_written_as_gemm_are_fused(name: str) -> None:
    first, second, scale = FORMS[name]
    fused, sites = fuse(model(f"{first} p = Softmax <axis = -1> (s)\n {second}", inputs=INPUTS, outputs=OUT))
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert site.attributes.scale == pytest.approx(scale)
    numbers = operands()
    (got,) = run(fused.SerializeToString(), numbers)
    np.testing.assert_allclose(got, expected(*numbers, scale), atol=3e-6, rtol=0)


def test_what_the_first_product_adds_is_a_bias_and_what_multiplies_it_later_does_so_too() -> None:
    body = (
        "s = Gemm <transB = 1, alpha = 0.25, beta = 3.0> (q, k, m)\n t = Mul (s, scale)\n"
        "p = Softmax <axis = -1> (t)\n out = Gemm (p, v)\n"
    )
    fused, sites = fuse(model(body, inputs=f"{INPUTS}, float[S, T] m", outputs=OUT))
    site = only(sites)
    assert site.attributes is not None
    assert (site.attributes.scale, site.attributes.has_bias) == (0.125, 1)
    numbers = operands()
    bias = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    bias[1:, 0] = -np.inf
    (got,) = run(fused.SerializeToString(), [*numbers, bias])
    np.testing.assert_allclose(got, expected(*numbers, 0.125, 1.5 * bias.astype(np.float64)), atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ("out = Gemm (p, v, extra)\n", "adds a tensor to the product with V"),
        ("out = Gemm (v, extra, p)\n", "adds the probabilities to a product"),
    ],
)
def test_a_second_product_that_adds_is_refused(second: str, text: str) -> None:
    body = f"s = Gemm <transB = 1> (q, k)\n p = Softmax <axis = -1> (s)\n {second}"
    shapes = "float[6, 8] q, float[6, 8] k, float[6, 6] v, float[6, 6] extra"
    _, sites = fuse(model(body, inputs=shapes, outputs="float[6, 6] out"))
    reason = only(sites).reason
    assert reason is not None
    assert (reason.code, text in reason.text) == ("product_form", True)


def test_a_linear_layer_below_a_softmax_over_a_linear_layer_is_no_attention() -> None:
    weights = "w = Constant <value = float[8, 7] {" + ", ".join(["0.5"] * 56) + "}> ()\n "
    body = f"{weights}s = Gemm (q, w)\n p = Softmax <axis = -1> (s)\n out = MatMul (p, v)\n"
    assert code(model(body, inputs="float[S, 8] q, float[7, 6] v", outputs=OUT)) == "not_attention"
