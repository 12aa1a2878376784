# SPDX-License-Identifier: Apache-2.0
"""Rows whose every key carries a large number neither hide a fault of the others nor are taken on trust."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.attention_pairs import Recipe, build, site_of
from exporter.test_check_site import alone, run_site, seen, typed

from flash_export import accept, pipeline
from flash_export.accept import Noise
from flash_export.check_site import _Sample
from flash_export.drowned import DrownedRows
from flash_export.function_body import functions_for
from flash_export.input_roles import read_roles
from flash_export.op import DOMAIN, LAYOUT_BHSD, Attributes
from flash_export.options import Options
from flash_export.sites import Site
from flash_export.talk import Talk

DROWNED = Recipe(sites=2, fill=-1e9, causal="top_left")
"""Of the batch entry whose first four keys are padding, the first four rows see nothing else."""


@pytest.mark.parametrize("fill", [-1e4, -1e9, float(np.finfo(np.float32).min)])
def test_a_site_with_such_rows_is_proven(fill: float, tmp_path: Path) -> None:
    (run,) = run_site(Recipe(sites=2, fill=fill, causal="top_left"), tmp_path)
    assert run.verdict.passed
    assert run.verdict.compared == 2 * 7 * 60


@pytest.mark.parametrize("fault", ["scale", "mask_dropped", "causal_kind", "key_value_swapped"])
def test_a_fault_of_such_a_site_shows(fault, tmp_path: Path) -> None:
    plain, flash = build(DROWNED, fused=False), build(DROWNED, fused=True, fault=fault, at=0)
    (run,) = alone(typed(site_of(DROWNED, 0), plain, flash), plain, flash, seen(), tmp_path)
    assert not run.verdict.passed


def test_both_kinds_of_rows_are_judged_each_by_its_own_tolerance() -> None:
    drowned = np.array([[True], [False]]).repeat(3, axis=1)
    reference, noises = np.ones((2, 3)), (Noise(1e-6, 1e-6), Noise(0.5, 0.5))
    sample = _Sample("a trial", 3.0, reference, *noises, drowned, "", "", nan_goes_in=False, overflow=None)
    off = {(0, 0.9): True, (0, 1.1): False, (1, 1e-6): True, (1, 1e-4): False}
    for (row, by), passes in off.items():
        output = reference.astype(np.float32)
        output[row, 1] += by
        assert sample.judged(output, noises, accept.FACTOR).passed == passes, (row, by)


def test_the_rest_of_an_output_is_no_part_of_a_verdict_on_some_of_its_numbers() -> None:
    reference, among = np.array([1.0, 2.0, np.nan, np.inf]), np.array([True, False, False, False])
    output = np.array([1.0, 9.0, np.nan, 3.0], np.float32)
    verdict = accept.judge(output, reference, Noise(0.0, 0.0), among=among)
    assert (verdict.why, verdict.compared, verdict.max_abs_error, verdict.reference_is_nan) == ("", 1, 0.0, 0)
    other = accept.judge(output, reference, Noise(0.0, 0.0), among=~among)
    assert not other.passed
    joined = verdict.beside(other)
    assert (joined.passed, joined.why, joined.compared) == (False, other.why, 1 + other.compared)
    assert verdict.beside(verdict).passed


BANDS = [
    {},
    {"causal": 1},
    {"causal": 1, "diagonal": 1},
    {"window_left": 1, "window_right": 2},
    {"window_left": 0, "diagonal": 1, "causal": 1},
]


@pytest.mark.parametrize("layout", [0, LAYOUT_BHSD])
@pytest.mark.parametrize("lengths", [None, [3, 7]], ids=["all keys", "lengths"])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_rows_are_those_whose_best_visible_key_is_drowned(band, lengths, layout, tmp_path: Path) -> None:
    b, hq, hkv, s, t, d = 2, 4, 2, 5, 7, 3
    attributes = Attributes(hq, hkv, 0.5, layout, has_bias=1, has_kv_lengths=int(lengths is not None), **band)
    rng = np.random.default_rng(0)
    bias = np.where(rng.random((b, hq, s, t)) < 0.6, np.float32(-5e3), np.float32(0))
    bias[0, 1, 2], bias[1, 0, 3, 1] = -np.inf, 2e4
    node, site = one_node(attributes, bias, lengths or [2**31 - 1])
    q, k, v = ((b, n, s_, e) for n, s_, e in ((hq, s, d), (hkv, t, d), (hkv, t, d + 1)))
    feeds = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in zip("qkv", (q, k, v), strict=True)}
    if layout != LAYOUT_BHSD:
        feeds = {n: a.transpose(0, 2, 1, 3).reshape(b, a.shape[2], -1) for n, a in feeds.items()}
    found = DrownedRows(site, node, tmp_path).of(feeds)
    wanted = np.zeros((b, hq, s, d + 1), bool)
    for at in itertools.product(range(b), range(hq), range(s)):
        length = t if lengths is None else lengths[at[0]]
        p = at[2] + (length - s if attributes.diagonal else 0)
        seen_by = [
            j
            for j in range(length)
            if (not attributes.causal or j <= p)
            and (attributes.window_left < 0 or j >= p - attributes.window_left)
            and (attributes.window_right < 0 or j <= p + attributes.window_right)
        ]
        best = max((float(bias[(*at, j)]) for j in seen_by), default=-np.inf)
        wanted[at] = abs(best) in (5e3, 2e4)
    if layout != LAYOUT_BHSD:
        wanted = wanted.transpose(0, 2, 1, 3).reshape(b, s, -1)
    assert found is not None
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(4, 1, 1, 1), (1, 3, 1, 1), (1, 1, 1, 5)])
def test_of_a_bias_that_does_not_broadcast_nothing_is_said(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A constant of four batch entries in a model of any batch: the node refuses it, which is no error of the check."""
    attributes = Attributes(2, 2, 0.5, LAYOUT_BHSD, has_bias=1)
    node, site = one_node(attributes, np.full(shape, -5e3, np.float32), [2**31 - 1])
    feeds = {n: np.ones((2, 2, 7, 3), np.float32) for n in "qkv"}
    assert DrownedRows(site, node, tmp_path).of(feeds) is None


def one_node(attributes: Attributes, bias: np.ndarray, lengths: list[int]) -> tuple[ir.Model, Site]:
    """One FlashAttentionEx node over the inputs q, k and v."""
    rank = 4 if attributes.layout == LAYOUT_BHSD else 3
    inputs = [
        ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([f"{n}{i}" for i in range(rank)]))
        for n in "qkv"
    ]
    constants = [
        ir.Value(name=n, type=ir.TensorType(ir.tensor(a).dtype), const_value=ir.tensor(a, name=n))
        for n, a in (("bias", bias), ("n", np.array(lengths, np.int32)), ("sinks", np.array([-np.inf], np.float32)))
    ]
    node = ir.node("FlashAttentionEx", [*inputs, *constants], attributes.as_dict(), domain=DOMAIN, num_outputs=2)
    node.outputs[0].name, node.outputs[0].type = "o", inputs[0].type
    node.outputs[1].name = "lse"
    graph = ir.Graph(
        inputs, node.outputs[:1], nodes=[node], initializers=constants, opset_imports={"": 18, DOMAIN: 1}, name="one"
    )
    model = ir.Model(graph, ir_version=9, functions=functions_for([node], 18))
    return model, Site("one", "fused", attributes=attributes, output="o", boundary=("q", "k", "v"))


JOINED = (
    "one_mask = Unsqueeze (keep, heads)\n shape = Shape (scaled)\n ends = Slice (shape, ax2, ax4)\n"
    "all = ConstantOfShape <value = float[1] {1.0}> (ends)\n lower = Trilu <upper = 0> (all)\n"
    "both = Mul (lower, one_mask)\n"
)
INPUTS = "float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v, float[B, S] keep"
CONSTANTS = (
    graphs.CONSTANTS + ", int64[2] heads = {1, 2}, int64[1] ax4 = {4},"
    " float one = {1.0}, float many = {-1e9}, float two = {2.0}"
)


def added(after: str) -> onnx.ModelProto:
    body = graphs.PRODUCT + JOINED + after + "masked = Add (scaled, bias)\n"
    body += "probs = Softmax <axis = -1> (masked)\n out = MatMul (probs, v)\n"
    return graphs.model(body, inputs=INPUTS, constants=CONSTANTS)


def test_a_float_mask_that_a_product_joins_with_another_is_drawn_as_one(tmp_path: Path) -> None:
    proto = added("left = Sub (one, both)\n bias = Mul (left, many)\n")
    assert read_roles(ir.from_proto(proto))["keep"].kind == "mask"
    onnx.save(proto, tmp_path / "in.onnx")
    options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx")
    (site,) = pipeline.run(options, Talk(quiet=True)).sites
    assert site.status == "fused"


def test_numbers_that_are_subtracted_from_one_are_no_mask() -> None:
    assert (
        read_roles(ir.from_proto(added("left = Sub (one, both)\n bias = Mul (left, two)\n")))["keep"].kind == "number"
    )
    assert read_roles(ir.from_proto(added("bias = Mul (both, many)\n")))["keep"].kind == "number"
