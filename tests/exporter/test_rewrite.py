# SPDX-License-Identifier: Apache-2.0
"""A rewrite replaces what was found and nothing else: names, order, weights and refused sites stay."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import HEADS, JOIN, PLAIN, PROJECTED, SHAPES, SPLIT_HEADS, both, fuse, model, numbers

from flash_export.find import find
from flash_export.op import DOMAIN, INT_ATTRIBUTES, STRING_ATTRIBUTES
from flash_export.rewrite import rewrite
from flash_export.sites import Refusal

MASKED = (
    "keep = LessOrEqual (j, i)\n wide = Unsqueeze (pad, twice)\n kept = And (keep, wide)\n"
    "bias = Where (kept, zero, hidden)\n masked = Add (scaled, bias)\n"
)
TWO = {
    "inputs": graphs.QKV + ", bool[B, T] pad",
    "outputs": graphs.OUT + ", float[B, 4, S, 8] other",
    "constants": graphs.CONSTANTS + ", int64[2] twice = {1, 2}",
}


def two_attentions() -> onnx.ModelProto:
    """Two attentions under one padded causal mask."""
    second = "s2 = MatMul (out, kt)\n m2 = Add (s2, bias)\n p2 = Softmax <axis = -1> (m2)\n other = MatMul (p2, v)\n"
    return model(graphs.LENGTHS + graphs.PRODUCT + MASKED + graphs.REST + second, **TWO)


def test_the_mask_that_two_attentions_share_is_built_once() -> None:
    proto = two_attentions()
    fused, sites = fuse(proto)
    operators = [n.op_type for n in fused.graph.node]
    assert operators.count("FlashAttentionEx") == 2
    assert operators.count("Where") == 1
    sizes = {"B": 2, "S": 5, "T": 7}
    pad = np.ones((2, 7), bool)
    pad[1, 4:] = False
    expected, got = both(proto, fused, [*numbers(sizes), pad])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)
    assert len({s.name for s in sites}) == 2


def test_a_skipped_site_stays_and_the_other_is_still_right() -> None:
    proto = two_attentions()
    converted = ir.from_proto(proto)
    sites = find(converted)
    sites[0].status = "refused"
    sites[0].reason = Refusal("skipped", "asked for", sites[0].name, "leave --skip out")
    assert rewrite(converted, sites) == 1
    fused = ir.to_proto(converted)
    onnx.checker.check_model(fused, full_check=True, check_custom_domain=True)
    assert [n.op_type for n in fused.graph.node].count("Softmax") == 1
    sizes = {"B": 2, "S": 5, "T": 7}
    expected, got = both(proto, fused, [*numbers(sizes), np.ones((2, 7), bool)])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)
    names = {v.name for v in converted.graph.inputs} | {v.name for n in converted.graph for v in n.outputs}
    assert set(sites[1].boundary) <= names


def test_boundary_values_and_output_exist_on_both_sides_and_cut_the_graph() -> None:
    body = HEADS + SPLIT_HEADS + PLAIN.replace("out =", "out4 =") + JOIN
    proto = model(body, inputs=PROJECTED, outputs="float[B, S, 32] out", constants=SHAPES)
    converted = ir.from_proto(proto)
    site = find(converted)[0]
    rewrite(converted, [site])
    for graph in (ir.from_proto(proto).graph, converted.graph):
        values = {str(v.name): v for v in graph.inputs} | {str(v.name): v for n in graph for v in n.outputs}
        assert {*site.boundary, site.output} <= set(values)
        stack, reached = [values[site.output]], set()
        while stack:
            value = stack.pop()
            if value.name in site.boundary:
                continue
            node = value.producer()
            if node is None:
                reached.add(value.name)
                continue
            stack.extend(v for v in node.inputs if v is not None)
        assert reached <= set(graph.initializers)


def test_every_attribute_is_written_and_only_used_bodies_travel() -> None:
    fused, _ = fuse(model(PLAIN))
    node = fused.graph.node[0]
    written = {a.name for a in node.attribute}
    assert set(INT_ATTRIBUTES) | set(STRING_ATTRIBUTES) | {"scale", "softcap"} == written
    assert [f.name for f in fused.functions] == ["FlashAttention"]
    assert [(o.domain, o.version) for o in fused.opset_import if o.domain == DOMAIN] == [(DOMAIN, 1)]


def test_without_fallback_no_body_travels() -> None:
    converted = ir.from_proto(model(PLAIN))
    rewrite(converted, find(converted), fallback=False)
    assert not converted.functions
    assert [n.op_type for n in converted.graph] == ["FlashAttention"]


def test_what_nothing_reads_any_more_is_gone_and_weights_stay() -> None:
    body = HEADS + SPLIT_HEADS + PLAIN.replace("out =", "out4 =") + JOIN
    proto = model(body, inputs=PROJECTED, outputs="float[B, S, 32] out", constants=SHAPES)
    converted = ir.from_proto(proto)
    rewrite(converted, find(converted))
    assert set(converted.graph.initializers) == set()
    assert [v.name for v in converted.graph.outputs] == ["out"]


@pytest.mark.parametrize("opset", [11, 13, 18, 21, 23])
def test_squeezes_and_bodies_are_written_for_the_models_own_opset(opset: int) -> None:
    proto = model(
        graphs.PRODUCT + "masked = Add (scaled, m)\n" + graphs.REST, inputs=graphs.QKV + ", float[T] m", opset=opset
    )
    fused, _ = fuse(proto)
    assert "Unsqueeze" in [n.op_type for n in fused.graph.node]
    assert [n.name for n in fused.functions] == ["FlashAttentionEx"]
    expected, got = both(proto, fused, [*numbers({"B": 2, "S": 5, "T": 7}), np.linspace(-2, 2, 7, dtype=np.float32)])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_scaled_bias_is_scaled_in_the_fused_graph_too() -> None:
    proto = model(
        "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n s = MatMul (q, kt)\n sm = Sub (s, m)\n"
        "masked = Mul (sm, scale)\n" + graphs.REST,
        inputs=graphs.QKV + ", float[S, T] m",
    )
    fused, _ = fuse(proto)
    mask = np.random.default_rng(7).standard_normal((5, 7)).astype(np.float32)
    expected, got = both(proto, fused, [*numbers({"B": 2, "S": 5, "T": 7}), mask])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)
