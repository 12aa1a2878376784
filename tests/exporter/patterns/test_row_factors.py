# SPDX-License-Identifier: Apache-2.0
"""A factor of the scores' rows is multiplied into Q only where the product of Q and K has all of its axes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter.graphs import CONSTANTS, PRODUCT, REST, both, code, fuse, holding, model, only

from flash_export.find import find
from flash_export.sites import Site

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


WIDENED = (
    "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n scores = MatMul (q, kt)\n wide = Cast <to = {wide}> (scores)\n"
    "scaled = Mul (wide, {factor})\n p = Softmax <axis = -1> (scaled)\n probs = Cast <to = {half}> (p)\n"
    "out = MatMul (probs, v)\n"
)
HALVES = ("float16", 10, "fp16"), ("bfloat16", 16, "bf16")


def widened(
    kind: str, half: int, factor: str = "f", wide: int = 1, *, of: str = "float", query: str = "q = Identity (q0)\n"
) -> onnx.ModelProto:
    """Scores of Q and K in ``kind`` that are cast to ``wide`` and multiplied by ``factor``; f has one for each head."""
    inputs = f"{kind}[B, 3, S, 8] q0, {kind}[B, 3, T, 8] k, {kind}[B, 3, T, 8] v, {of}[3, 1, 1] f"
    body = query + WIDENED.format(half=half, factor=factor, wide=wide)
    proto = model(body, inputs=inputs, outputs=f"{kind}[B, 3, S, 8] out", constants=CONSTANTS)
    for node in proto.graph.node:
        node.name = f"n_{node.output[0]}"
    return proto


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("kind", "half", "short"), HALVES)
def test_a_factor_of_another_type_than_q_is_refused_by_both_types(
    kind: str, half: int, short: str, constant: bool
) -> None:
    proto = widened(kind, half)
    if constant:
        proto = holding(proto, f=np.array([0.2, 0.5, 1.0], np.float32).reshape(3, 1, 1))
    site = only(fuse(proto)[1])
    assert site.reason is not None
    assert site.reason.code == "dtype"
    assert site.reason.text.startswith(f'Q is {short}, and the factor "f" of the scores\' rows fp32; ')
    assert site.reason.node == "n_scaled"
    assert f"multiply q by the factor, cast to {short}, before the product" in site.reason.action


@pytest.mark.parametrize(("kind", "half", "short"), HALVES)
def test_where_q_and_k_are_widened_the_factor_is_what_keeps_q_so(kind: str, half: int, short: str) -> None:
    """Without it the node reads Q and K above their casts."""

    def of(factor: str) -> Site:
        product = "wide_q = Cast <to = 1> (q)\n wide_k = Cast <to = 1> (k)\n" + PRODUCT.replace("(k)", "(wide_k)")
        body = product.replace("(q, kt)", "(wide_q, kt)") + f"more = Mul (scaled, {factor})\n"
        body += f"p = Softmax <axis = -1> (more)\n probs = Cast <to = {half}> (p)\n out = MatMul (probs, v)\n"
        inputs = ", ".join(f"{kind}[B, 3, {n}, 8] {name}" for name, n in (("q", "S"), ("k", "T"), ("v", "T")))
        return only(fuse(model(body, inputs=f"{inputs}, float[3, 1, 1] f", outputs=f"{kind}[B, 3, S, 8] out"))[1])

    reason = of("f").reason
    assert reason is not None
    assert reason.code == "dtype"
    assert reason.text.endswith('; the factor "f" of the scores\' rows, which becomes one of Q, is fp32')
    assert f"cast to {short}, before the product" in reason.action
    assert of("scale").status == "fused"


@pytest.mark.parametrize(("kind", "half"), [half[:2] for half in HALVES])
def test_a_factor_of_the_type_of_q_is_fused(kind: str, half: int) -> None:
    """The way out that the refusal names; and a scalar of float32 is the scale."""
    before = widened(kind, half, factor="scale", query=f"less = Cast <to = {half}> (f)\n q = Mul (q0, less)\n")
    assert only(fuse(before)[1]).status == "fused"
    assert only(fuse(widened(kind, half, wide=half, of=kind))[1]).status == "fused"


NUMBERS = {
    "NaN": (np.nan, "float", "not_finite", 'the factor "f" of the scores\' rows holds NaN'),
    "infinity": (np.inf, "float", "not_finite", "holds +infinity"),
    "minus infinity": (-np.inf, "float", "not_finite", "holds -infinity"),
    "too large": (-3e38, "float", "attribute_range", "comes to 3e+38, and Q times that may leave what float32 holds"),
    "too large for fp16": (5e3, "float16", "attribute_range", "comes to 5000, and Q times that may leave what float16"),
    "infinity in fp16": (np.inf, "float16", "not_finite", "holds +infinity"),
}


@pytest.mark.parametrize(("number", "kind", "reason", "text"), NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 3, 1, 1)])
def test_numbers_of_one_head_that_leave_nothing_to_attend_to_are_named(
    number: float, kind: str, reason: str, text: str, shape: tuple[int, ...]
) -> None:
    factor = np.array([number, 0.2, 0.9], "float32" if kind == "float" else kind).reshape(shape)
    site = only(fuse(multiplied(factor, kind))[1])
    assert site.reason is not None
    assert site.reason.code == reason
    assert text in site.reason.text


def test_other_numbers_of_a_head_are_fused_and_0_for_all_is_named() -> None:
    def of(first: float, *others: float) -> str:
        return code(multiplied(np.array([first, *others], np.float32).reshape(3, 1, 1), "float"))

    assert [of(first, 0.2, 0.9) for first in (0.0, -2.0, 1e20)] == ["fused"] * 3
    assert of(0.0, 0.0, 0.0) == "scale_zero"


def multiplied(factor: np.ndarray, kind: str) -> onnx.ModelProto:
    """Attention of three heads whose scores are multiplied by the constant ``factor``."""
    dims = ", ".join(map(str, factor.shape))
    inputs = ", ".join(f"{kind}[B, 3, {n}, 8] {name}" for name, n in (("q", "S"), ("k", "T"), ("v", "T")))
    body = "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n scores = MatMul (q, kt)\n masked = Mul (scores, f)\n" + REST
    proto = model(body, inputs=f"{inputs}, {kind}[{dims}] f", outputs=f"{kind}[B, 3, S, 8] out")
    return holding(proto, f=factor)
