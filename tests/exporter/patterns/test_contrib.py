# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's own attention operators give the same numbers as one node, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from exporter.graphs import only
from exporter.torch_exports import run

from flash_export import pipeline
from flash_export.errors import NumbersDiffer
from flash_export.find import find
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.patterns.contrib import OPERATORS
from flash_export.rewrite import rewrite
from flash_export.sites import Site
from flash_export.talk import Talk

B, S, T, P, H, D = 2, 5, 7, 3, 4, 8  # grouped queries need a head dim of 8 n there
WIDE = H * D


def model(call: str, inputs: str, outputs: str = "float[B, S, N] out", results: str = "out") -> onnx.ModelProto:
    """One operator of com.microsoft, its dims dynamic but for heads and head dims."""
    text = (
        '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>\n'
        f"main ({inputs}) => ({outputs})\n{{ {results} = com.microsoft.{call} }}\n"
    )
    return onnx.parser.parse_model(text)


def fuse(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Site]:
    converted = ir.from_proto(proto)
    sites = find(converted)
    rewrite(converted, sites)
    fused = ir.to_proto(converted)
    onnx.checker.check_model(fused, check_custom_domain=False)
    return fused, only(sites)


def feeds(proto: onnx.ModelProto, seed: int, special: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Random floats of the declared shapes; ``special`` arrays as they are."""
    random = np.random.default_rng(seed)
    sizes = {"B": B, "S": S, "T": T, "P": P}
    arrays = []
    for value in proto.graph.input:
        shape = [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        arrays.append(special.get(value.name, random.standard_normal(shape).astype(np.float32)))
    return arrays


QKV = f"float[B, S, {WIDE}] q, float[B, T, {WIDE}] k, float[B, T, {H * 3}] v"
SELF = f"float[B, S, {WIDE}] q, float[B, S, {WIDE}] k, float[B, S, {WIDE}] v"
CACHE = f"float[B, {H}, P, {D}] old_k, float[B, {H}, P, {D}] old_v"
PRESENT = f"float[B, S, N] out, float[B, {H}, A, {D}] pk, float[B, {H}, A, {D}] pv"
PADDED = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]], np.int32)
MULTIHEAD: dict[str, tuple[onnx.ModelProto, str, dict[str, np.ndarray]]] = {
    "plain": (model(f"MultiHeadAttention <num_heads = {H}> (q, k, v)", QKV), "FlashAttention", {}),
    "scaled": (model(f"MultiHeadAttention <num_heads = {H}, scale = 0.3> (q, k, v)", QKV), "FlashAttention", {}),
    "causal": (
        model(f"MultiHeadAttention <num_heads = {H}, unidirectional = 1> (q, k, v)", SELF),
        "FlashAttention",
        {},
    ),
    "projection_bias": (
        model(f"MultiHeadAttention <num_heads = {H}> (q, k, v, b)", f"{SELF}, float[{3 * WIDE}] b"),
        "FlashAttention",
        {},
    ),
    "padding": (
        model(f"MultiHeadAttention <num_heads = {H}> (q, k, v, , m)", f"{QKV}, int32[B, T] m"),
        "FlashAttentionEx",
        {"m": PADDED},
    ),
    "lengths": (
        model(f"MultiHeadAttention <num_heads = {H}> (q, k, v, , m)", f"{QKV}, int32[B] m"),
        "FlashAttentionEx",
        {"m": np.array([4, 0], np.int32)},
    ),
    "bias": (
        model(f"MultiHeadAttention <num_heads = {H}> (q, k, v, , , m)", f"{QKV}, float[1, {H}, S, T] m"),
        "FlashAttentionEx",
        {},
    ),
    "cache": (
        model(
            f"MultiHeadAttention <num_heads = {H}, unidirectional = 1> (q, k, v, , , , old_k, old_v)",
            f"{SELF}, {CACHE}",
            PRESENT,
            "out, pk, pv",
        ),
        "FlashAttention",
        {},
    ),
}
X = f"float[B, S, 9] x, float[9, {3 * WIDE}] w, float[{3 * WIDE}] b"
PACKED_WEIGHTS = {
    "plain": (model(f"Attention <num_heads = {H}> (x, w, b)", X), "FlashAttentionPacked", {}),
    "causal": (
        model(f"Attention <num_heads = {H}, unidirectional = 1> (x, w, b)", X),
        "FlashAttentionPacked",
        {},
    ),
    "uneven": (
        model(
            f"Attention <num_heads = {H}, qkv_hidden_sizes = [{WIDE}, {WIDE}, 8]> (x, w, b)",
            f"float[B, S, 9] x, float[9, {2 * WIDE + 8}] w, float[{2 * WIDE + 8}] b",
        ),
        "FlashAttention",
        {},
    ),
    "padding": (
        model(f"Attention <num_heads = {H}> (x, w, b, m)", X + ", int32[B, S] m"),
        "FlashAttentionEx",
        {"m": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)},
    ),
}
GQA = f"float[B, S, {WIDE}] q, float[B, S, {2 * D}] k, float[B, S, {2 * D}] v, int32[B] last, int32 total"
WHOLE = {"last": np.full(B, S - 1, np.int32), "total": np.array(S, np.int32)}
HEADS = f"num_heads = {H}, kv_num_heads = 2"
GROUPED = {
    "plain": (model(f"GroupQueryAttention <{HEADS}> (q, k, v, , , last, total)", GQA), "FlashAttentionEx", WHOLE),
    "window": (
        model(f"GroupQueryAttention <{HEADS}, local_window_size = 2> (q, k, v, , , last, total)", GQA),
        "FlashAttentionEx",
        WHOLE,
    ),
    "softcap": (
        model(f"GroupQueryAttention <{HEADS}, softcap = 2.0, scale = 0.7> (q, k, v, , , last, total)", GQA),
        "FlashAttentionEx",
        WHOLE,
    ),
    "present": (
        model(
            f"GroupQueryAttention <{HEADS}> (q, k, v, , , last, total)",
            GQA,
            f"float[B, S, N] out, float[B, 2, A, {D}] pk, float[B, 2, A, {D}] pv",
            "out, pk, pv",
        ),
        "FlashAttentionEx",
        WHOLE,
    ),
    "packed": (
        model(
            f"GroupQueryAttention <{HEADS}> (q, , , , , last, total)",
            f"float[B, S, {WIDE + 4 * D}] q, int32[B] last, int32 total",
        ),
        "FlashAttentionEx",
        WHOLE,
    ),
}
CASES = {
    f"{family}-{name}": case
    for family, cases in (("multihead", MULTIHEAD), ("packed_weights", PACKED_WEIGHTS), ("grouped", GROUPED))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_contrib_operator_gives_the_same_numbers_as_one_node(name: str) -> None:
    proto, operator, special = CASES[name]
    fused, site = fuse(proto)
    assert site.status == "fused", site.reason
    assert site.operator == operator
    assert [n.op_type for n in fused.graph.node if n.domain == DOMAIN] == [operator]
    assert not [n for n in fused.graph.node if n.domain == "com.microsoft"]
    arrays = feeds(proto, 1, special)
    right, got = run(proto.SerializeToString(), arrays), run(fused.SerializeToString(), arrays)
    assert len(right) == len(got) == len(proto.graph.output)
    for ours, theirs in zip(got, right, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6, rtol=0)


def test_keys_and_values_in_one_tensor_are_taken_apart() -> None:
    """ONNX Runtime runs these forms on GPUs alone, so the same operator with all apart is the reference."""
    whole = model(f"MultiHeadAttention <num_heads = {H}> (q)", f"float[B, S, {H}, 3, {D}] q")
    half = model(f"MultiHeadAttention <num_heads = {H}> (q, k)", f"float[B, S, {WIDE}] q, float[B, S, {H}, 2, {D}] k")
    apart = model(f"MultiHeadAttention <num_heads = {H}> (q, k, v)", SELF).SerializeToString()
    qkv = feeds(whole, 2, {})[0]
    parts = [qkv[:, :, :, i].reshape(B, S, WIDE) for i in range(3)]
    right = run(apart, parts)[0]
    for proto, arrays in ((whole, [qkv]), (half, [parts[0], qkv[:, :, :, 1:]])):
        np.testing.assert_allclose(run(fuse(proto)[0].SerializeToString(), arrays)[0], right, atol=5e-6, rtol=0)


REFUSED = {
    "left_padding": model(f"Attention <num_heads = {H}> (x, w, b, m)", X + ", int32[M] m"),
    "shared_buffer": model(
        f"MultiHeadAttention <num_heads = {H}> (q, k, v, , , , old_k, old_v, n)", f"{SELF}, {CACHE}, int32[1] n"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_run_time_knows_is_refused_and_changes_nothing(name: str) -> None:
    fused, site = fuse(REFUSED[name])
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.code in ("cache_in_place", "bias_shape")
    assert [n.op_type for n in fused.graph.node] == [n.op_type for n in REFUSED[name].graph.node]


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_without_a_reader_is_refused_by_name(operator: str) -> None:
    _, site = fuse(model(f"{operator} <num_heads = {H}> (q, k, v)", QKV))
    assert site.reason is not None
    assert operator in site.reason.text
    assert site.reason.code == ("quantized" if operator.startswith("Q") else site.reason.code)
    assert site.reason.code in ("contrib_operator", "cache_in_place", "quantized")


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_the_check_of_an_operator_without_a_float64_twin_lets_rounding_pass_and_no_scale(
    factor: float, tmp_path: Path
) -> None:
    onnx.save(CASES["multihead-plain"][0], tmp_path / "in.onnx")
    options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx")

    def scaled(model: ir.Model, sites: list[Site], *, fallback: bool) -> int:
        count = rewrite(model, sites, fallback=fallback)
        for node in model.graph:
            if node.domain == DOMAIN:
                node.attributes["scale"] = ir.AttrFloat32("scale", factor * node.attributes["scale"].as_float())
        return count

    with mock.patch.object(pipeline, "rewrite", scaled):
        if factor == 1.0:
            assert pipeline.run(options, Talk(quiet=True)).saved is not None
        else:
            with pytest.raises(NumbersDiffer):
                pipeline.run(options, Talk(quiet=True))
