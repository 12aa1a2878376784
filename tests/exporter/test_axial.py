# SPDX-License-Identifier: Apache-2.0
"""Attention along one axis of a grid, the other being batch: both may be dynamic, and so may the batch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from exporter.graphs import CONSTANTS, fuse, model, only, sites_checked
from exporter.torch_exports import run

import flash_export
from flash_export import check
from flash_export.errors import NumbersDiffer

SIZES = [(2, 3, 5), (3, 7, 2), (1, 1, 1), (1, 4, 1), (2, 1, 67), (0, 3, 5), (2, 0, 5), (2, 3, 0)]
"""Of batch, rows and columns."""

ALONG = {
    "rows": ("bywhc,byxhc->byhwx", "byhwx,byxhc->bywhc"),
    "columns": ("bywhc,bzwhc->bwhyz", "bwhyz,bzwhc->bywhc"),
    "columns, of heads first": ("bhywc,bhzwc->bhwyz", "bhwyz,bhzwc->bhywc"),
}


def grid(along: str, *, bias: bool = False, fixed: tuple[int, int] | None = None) -> onnx.ModelProto:
    """A model of Q, K and V; ``fixed`` are rows and columns where they are not dynamic."""
    first, second = ALONG[along]
    dims = "B, 3, R, C, 8" if "heads first" in along else "B, R, C, 3, 8"
    inputs = ", ".join(f"float[{dims}] {name}" for name in "qkv") + (", float[R, 1, C, C] bias" if bias else "")
    body = f'scores = Einsum <equation = "{first}"> (q, k)\n scaled = Mul (scores, scale)\n'
    body += "biased = Add (scaled, bias)\n" if bias else "biased = Identity (scaled)\n"
    body += f'probs = Softmax <axis = -1> (biased)\n out = Einsum <equation = "{second}"> (probs, v)\n'
    outputs = f"float[{dims}] out"
    for name, number in zip("RC", fixed or (), strict=False):
        inputs, outputs = (text.replace(f"{name},", f"{number},") for text in (inputs, outputs))
    return model(body, inputs=inputs, outputs=outputs)


def arrays(along: str, size: tuple[int, int, int], seed: int) -> list[np.ndarray]:
    batch, rows, columns = size
    shape = (batch, 3, rows, columns, 8) if "heads first" in along else (batch, rows, columns, 3, 8)
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for _ in "qkv"]


def expected(along: str, inputs: list[np.ndarray], bias: np.ndarray | None = None) -> np.ndarray:
    """The same in float64."""
    q, k, v = (x.astype(np.float64) for x in inputs)
    first, second = ALONG[along]
    scores = 0.5 * np.einsum(first, q, k)
    scores = scores if bias is None else scores + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return np.einsum(second, weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("along", ALONG)
def test_every_length_of_a_grid_may_be_dynamic(along: str) -> None:
    fused, sites = fuse(grid(along))
    site = only(sites)
    assert site.status == "fused", site.reason
    for seed, size in enumerate(SIZES):
        inputs = arrays(along, size, seed)
        (got,) = run(fused.SerializeToString(), inputs)
        np.testing.assert_allclose(got, expected(along, inputs), atol=3e-6, rtol=0)


def test_a_bias_for_each_row_is_that_of_its_row_in_every_batch_entry() -> None:
    fused, sites = fuse(grid("rows", bias=True))
    assert only(sites).status == "fused", only(sites).reason
    for seed, size in enumerate(SIZES[:5]):
        inputs = arrays("rows", size, seed)
        _, rows, columns = size
        bias = np.random.default_rng(seed).standard_normal((rows, 1, columns, columns)).astype(np.float32)
        (got,) = run(fused.SerializeToString(), [*inputs, bias])
        np.testing.assert_allclose(got, expected("rows", inputs, bias), atol=3e-6, rtol=0)


@pytest.mark.parametrize("along", ALONG)
def test_no_length_is_computed_where_only_the_batch_is_dynamic(along: str) -> None:
    fused, sites = fuse(grid(along, fixed=(7, 5)))
    assert only(sites).status == "fused", only(sites).reason
    assert not [node.name for node in fused.graph.node if node.op_type == "Shape"]
    inputs = arrays(along, (3, 7, 5), 0)
    (got,) = run(fused.SerializeToString(), inputs)
    np.testing.assert_allclose(got, expected(along, inputs), atol=3e-6, rtol=0)


MASKED = """
    b = Shape <start = 0, end = 1> (x)\n r = Shape <start = 1, end = 2> (x)\n c = Shape <start = 2, end = 3> (x)
    entries = Mul (b, r)\n split = Concat <axis = 0> (entries, c, heads)
    row = Concat <axis = 0> (entries, one, one, c)
    q0 = Sigmoid (x)\n q1 = Reshape (q0, split)\n q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = Tanh (x)\n k1 = Reshape (k0, split)\n kt = Transpose <perm = [0, 2, 3, 1]> (k1)
    v0 = Relu (x)\n v1 = Reshape (v0, split)\n v = Transpose <perm = [0, 2, 1, 3]> (v1)
    scores = MatMul (q, kt)\n scaled = Mul (scores, scale)\n mask = Reshape (m, row)
    masked = Where (mask, scaled, lowest)\n probs = Softmax <axis = -1> (masked)\n o = MatMul (probs, v)
    turned = Transpose <perm = [0, 2, 1, 3]> (o)\n whole = Concat <axis = 0> (b, r, c, width)
    out = Reshape (turned, whole)
"""


GRID = CONSTANTS + ", int64[2] heads = {3, 8}, int64[1] one = {1}, int64[1] width = {24}"


def layers(count: int) -> onnx.ModelProto:
    """``MASKED`` several times, each on what the one before gave."""
    body, before = "", "x"
    for i in range(count):
        names = {name: f"{name}_{i}" for name in re.findall(r"(\w+) = \w+ [(<]", MASKED)} | {"x": before}
        body += re.sub(r"\b\w+\b(?! [(<])", lambda word, names=names: names.get(word[0], word[0]), MASKED)  # type: ignore[misc]
        before = names["out"]
    return model(
        body + f"out = Identity ({before})\n",
        inputs="float[B, R, C, 24] x, bool[B, R, C] m",
        outputs="float[B, R, C, 24] out",
        constants=GRID,
    )


def test_rows_of_a_grid_with_a_mask_are_proven_alone_and_layers_but_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask's Reshape computes its target: the value that it has a length from is at the site's boundary, and of a
    layer's own numbers nothing else is read there."""
    asked = sites_checked(monkeypatch)
    assert [site.status for site in flash_export.rewrite(layers(3)).sites] == ["fused"] * 3
    assert len(asked) == 1


def test_a_mask_that_is_turned_round_along_columns_is_seen(tmp_path: Path) -> None:
    """Padding fills a column evenly: it hides all keys or none; the longest setting has room for one grid alone."""
    proto = model(
        """qt = Transpose <perm = [0, 2, 3, 1, 4]> (q)\n kt = Transpose <perm = [0, 2, 3, 4, 1]> (k)
        vt = Transpose <perm = [0, 2, 3, 1, 4]> (v)\n scores = MatMul (qt, kt)\n scaled = Mul (scores, scale)
        turned = Transpose <perm = [0, 2, 1]> (m)\n mask = Unsqueeze (turned, axes)
        masked = Where (mask, scaled, lowest)\n probs = Softmax <axis = -1> (masked)\n o = MatMul (probs, vt)
        out = Transpose <perm = [0, 3, 1, 2, 4]> (o)\n""",
        inputs=", ".join(f"float[B, R, C, 3, 8] {name}" for name in "qkv") + ", bool[B, R, C] m",
        outputs="float[B, R, C, 3, 8] out",
        constants=CONSTANTS + ", int64[2] axes = {2, 3}",
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    (node,) = (node for node in fused.graph.node if node.op_type == "FlashAttentionEx")
    place = list(fused.graph.node).index(node)
    for name, number in (("last", -1), ("before_first", -(2**31)), ("keys", 3)):
        fused.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number]), name))
    fused.graph.node.insert(
        place, onnx.helper.make_node("Slice", [node.input[3], "last", "before_first", "keys", "last"], ["turned_round"])
    )
    fused.graph.node[place + 1].input[3] = "turned_round"
    paths = tmp_path / "unfused.onnx", tmp_path / "fused.onnx"
    for path, one in zip(paths, (proto, fused), strict=True):
        onnx.save(one, path)
    with pytest.raises(NumbersDiffer, match=site.name):
        check.check(*paths, sites, reference=None, example={}, dims={}, values=None)
