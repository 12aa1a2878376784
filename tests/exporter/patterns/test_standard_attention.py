# SPDX-License-Identifier: Apache-2.0
"""The standard Attention operator is fused in both its forms; what it adds beyond attention is refused."""

from __future__ import annotations

import warnings

import numpy as np
import onnx_ir as ir
import pytest
from contract.reference import attention as reference
from exporter import graphs
from exporter.graphs import (
    PLAIN,
    code,
    fuse,
    model,
    numbers,
    only,
)
from exporter.torch_exports import run
from onnx.backend.test.case.node import collect_testcases

from flash_export.find import find
from flash_export.rewrite import rewrite

STANDARD = {
    "plain": ("out = Attention (q, k, v)\n", {}),
    "causal": ("out = Attention <is_causal = 1, scale = 0.3> (q, k, v)\n", {"causal": 1, "scale": 0.3}),
    "softcap": ("out = Attention <softcap = 5.0> (q, k, v)\n", {"softcap": 5.0}),
    "mask": ("keep = LessOrEqual (j, i)\n out = Attention (q, k, v, keep)\n", {"causal": 1, "has_bias": 0}),
}


@pytest.mark.parametrize("opset", [23, 24, 25])
@pytest.mark.parametrize("name", STANDARD)
def test_the_standard_operator_is_fused(name: str, opset: int) -> None:
    line, expected = STANDARD[name]
    proto = model(graphs.LENGTHS + line, opset=opset)
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    for key, number in expected.items():
        assert getattr(site.attributes, key) == pytest.approx(number)
    written = model(
        LIKE_STANDARD[name],
        constants=graphs.CONSTANTS + ", float d = {0.35355339059}, float c = {0.3}, float cap = {5.0}",
    )
    sizes = {"B": 2, "S": 5, "T": 7}
    inputs = numbers(sizes)
    right = run(written.SerializeToString(), inputs)[0]
    got = run(fused.SerializeToString(), inputs)[0]
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


LIKE_STANDARD = {
    "plain": PLAIN.replace("scores, scale", "scores, d"),
    "causal": graphs.LENGTHS
    + graphs.PRODUCT.replace("scores, scale", "scores, c")
    + "keep = LessOrEqual (j, i)\n masked = Where (keep, scaled, hidden)\n"
    + graphs.REST,
    "softcap": graphs.PRODUCT.replace("scores, scale", "scores, d")
    + "a = Div (scaled, cap)\n b = Tanh (a)\n masked = Mul (b, cap)\n"
    + graphs.REST,
    "mask": graphs.LENGTHS
    + graphs.PRODUCT.replace("scores, scale", "scores, d")
    + "keep = LessOrEqual (j, i)\n masked = Where (keep, scaled, hidden)\n"
    + graphs.REST,
}


def test_the_standard_operator_in_3d_form_with_groups_is_fused_in_layout_0() -> None:
    proto = model(
        "out = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v)\n",
        inputs="float[B, S, 32] q, float[B, T, 16] k, float[B, T, 10] v",
        outputs="float[B, S, 20] out",
        opset=23,
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.attributes is not None
    assert (site.attributes.layout, site.attributes.q_num_heads, site.attributes.kv_num_heads) == (0, 4, 2)
    assert (site.head_dim, site.v_head_dim) == (8, 5)
    assert [n.op_type for n in fused.graph.node] == ["FlashAttention"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("out, weights, w2, qk = Attention (q, k, v)\n more = Relu (qk)\n", "probabilities_used"),
        ("out, pk, pv = Attention <is_causal = 1> (q, k, v, , past, past)\n", "causal_alignment"),
        ("out = Attention (q, k, v, short)\n", "mask_short"),
    ],
)
def test_what_the_standard_operator_adds_and_no_node_has_is_refused_by_name(line: str, expected: str) -> None:
    outputs = graphs.OUT + (", float[B, 4, S, T] more" if "more" in line else "")
    inputs = graphs.QKV.replace("T", "9") if "short" in line else graphs.QKV
    proto = model(line, inputs=inputs + ", float[B, 4, P, 8] past, float[S, 6] short", outputs=outputs, opset=23)
    assert code(proto) == expected
    assert [n.op_type for n in fuse(proto)[0].graph.node] == [n.op_type for n in proto.graph.node]


CACHED = {
    "4d": ("float[B, 4, S, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 5] v", "float[B, 4, S, 5] out", ""),
    "3d": (
        "float[B, S, 32] q, float[B, S, 16] k, float[B, S, 10] v",
        "float[B, S, 20] out",
        ", q_num_heads = 4, kv_num_heads = 2",
    ),
}


@pytest.mark.parametrize("form", CACHED)
@pytest.mark.parametrize(("rows", "past"), [(1, 6), (3, 4), (5, 0)])
def test_a_cache_inside_the_operator_becomes_a_concat_whose_results_stay_outputs(
    form: str, rows: int, past: int
) -> None:
    inputs, out, heads = CACHED[form]
    proto = model(
        f"out, pk, pv = Attention <is_causal = 1{heads}> (q, k, v, , old_k, old_v)\n more = Mul (pk, scale)\n",
        inputs=inputs + ", float[B, 2, P, 8] old_k, float[B, 2, P, 5] old_v",
        outputs=out + ", float[B, 2, N, 8] pk, float[B, 2, N, 5] pv, float[B, 2, N, 8] more",
        opset=23,
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert site.attributes.causal_kind == "bottom_right"
    assert [o.name for o in fused.graph.output] == ["out", "pk", "pv", "more"]
    random = np.random.default_rng(rows)
    dims = {"B": 2, "S": rows, "P": past}
    shapes = [[dims.get(d.dim_param, d.dim_value) for d in i.type.tensor_type.shape.dim] for i in proto.graph.input]
    arrays = [random.standard_normal(s).astype(np.float32) for s in shapes]
    for right, got in zip(run(proto.SerializeToString(), arrays), run(fused.SerializeToString(), arrays), strict=True):
        np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)


def test_lengths_of_a_static_cache_move_the_diagonal_with_them() -> None:
    proto = model(
        "out = Attention <is_causal = 1> (q, k, v, , , , lengths)\n",
        inputs=graphs.QKV + ", int64[B] lengths",
        opset=24,
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.attributes is not None
    assert (site.attributes.has_kv_lengths, site.attributes.has_bias) == (1, 0)
    assert site.attributes.causal_kind == "bottom_right"
    q, k, v = numbers({"B": 3, "S": 3, "T": 9})
    lengths = np.array([9, 4, 2], np.int64)  # the last is shorter than the queries: its first row sees no key
    right = reference(q, k, v, scale=8**-0.5, causal=1, diagonal=1, kv_lengths=lengths.astype(np.int32))[0]
    got = run(fused.SerializeToString(), [q, k, v, lengths])[0]
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=0)
    assert (got[2, :, 0] == 0).all()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other operators' cases divide by zero on purpose
    IN_STANDARD = [
        c for c in collect_testcases(None) if c.name.startswith("test_attention_") and "expanded" not in c.name
    ]


@pytest.mark.parametrize("case", IN_STANDARD, ids=lambda c: c.name)
def test_every_case_of_the_standard_is_refused_or_gives_the_standards_numbers(case) -> None:  # type: ignore[no-untyped-def]
    converted = ir.from_proto(case.model)
    sites = find(converted)
    site = only(sites)
    if rewrite(converted, sites) == 0:
        assert site.status == "refused"
        assert site.reason is not None
        return
    proto = ir.to_proto(converted)
    inputs, outputs = case.data_sets[0]
    if any(x.dtype.kind == "V" or x.dtype.name == "bfloat16" for x in inputs):
        return  # ONNX Runtime's Python binding takes no bf16 arrays; the operator's contract covers the type
    proto.ir_version = min(proto.ir_version, 11)
    got = run(proto.SerializeToString(), inputs)
    for output, right in zip(got, outputs, strict=True):
        # The standard's numbers were themselves computed in the case's own type.
        tolerance = 5e-3 if right.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(output, right, atol=tolerance, rtol=tolerance)


def test_the_standards_cases_are_fused_but_for_those_that_no_node_can_be() -> None:
    reasons = [site.reason.code for c in IN_STANDARD if (site := only(find(ir.from_proto(c.model)))).reason is not None]
    assert set(reasons) <= {"probabilities_used", "mask_short", "causal_alignment"}
    assert len(IN_STANDARD) - len(reasons) >= 60
