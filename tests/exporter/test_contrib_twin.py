# SPDX-License-Identifier: Apache-2.0
"""Operators that ONNX Runtime has for GPUs alone are written out for the check, which then proves what was fused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import test_optimized as optimized
from exporter.patterns.test_contrib import SELF, B, D, H, S, feeds, model
from exporter.torch_exports import run

from flash_export import contrib_twin, pipeline
from flash_export.errors import EXIT_UNSUPPORTED, NumbersDiffer, UnsupportedModel
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.rewrite import rewrite
from flash_export.sites import Site
from flash_export.talk import Talk


def bias_softmax(bias: str, inner: int) -> onnx.ModelProto:
    return optimized.parse(
        f"main ({optimized.HEADS_FIRST}, float[{bias}] m) => ({optimized.OUT}) {{\n"
        " s = FusedMatMul <alpha = 0.4, transB = 1> (q, k)\n"
        f" p = com.microsoft.BiasSoftmax <axis = 3, is_inner_broadcast = {inner}> (s, m)\n o = MatMul (p, v) }}"
    )


CASES = {
    "inner": bias_softmax("B, 1, 1, T", 1),
    "outer": bias_softmax("1, 1, S, T", 0),
    "packed": model(f"MultiHeadAttention <num_heads = {H}> (q)", f"float[B, S, {H}, 3, {D}] q"),
    "packed_bias": model(
        f"MultiHeadAttention <num_heads = {H}> (q, , , b)", f"float[B, S, {H}, 3, {D}] q, float[{3 * H * D}] b"
    ),
    "packed_keys": model(
        f"MultiHeadAttention <num_heads = {H}> (q, k)", f"float[B, S, {H * D}] q, float[B, T, {H}, 2, {D}] k"
    ),
}
REFUSED = {"packed_bias": "head_dim_dynamic"}
PROVEN = [name for name in CASES if name not in REFUSED]


def outcome(proto: onnx.ModelProto, folder: Path) -> list[Site]:
    onnx.save(proto, folder / "in.onnx")
    options = Options(source=folder / "in.onnx", output=folder / "out.onnx", allow_none=True)
    return list(pipeline.run(options, Talk(quiet=True)).sites)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_without_a_kernel_here_is_proven(name: str, tmp_path: Path) -> None:
    (site,) = outcome(CASES[name], tmp_path)
    assert (site.reason.code if site.reason else None) == REFUSED.get(name), site.reason


@pytest.mark.parametrize("name", PROVEN)
def test_a_wrong_scale_is_found_there_too(name: str, tmp_path: Path) -> None:
    def scaled(model: ir.Model, sites: list[Site], *, fallback: bool) -> int:
        count = rewrite(model, sites, fallback=fallback)
        for node in model.graph:
            if node.domain == DOMAIN:
                node.attributes["scale"] = ir.AttrFloat32("scale", 1.01 * node.attributes["scale"].as_float())
        return count

    with mock.patch.object(pipeline, "rewrite", scaled), pytest.raises(NumbersDiffer):
        outcome(CASES[name], tmp_path)


def test_without_it_such_a_model_runs_nowhere_here(tmp_path: Path) -> None:
    with mock.patch.object(contrib_twin, "write_out"), pytest.raises(UnsupportedModel):
        outcome(CASES["inner"], tmp_path)


def test_packed_operands_are_taken_apart_as_the_operator_takes_them() -> None:
    """The reference is the same operator with its operands apart, which has a kernel."""
    whole = CASES["packed"]
    qkv = feeds(whole, 2, {})[0]
    apart = model(f"MultiHeadAttention <num_heads = {H}> (q, k, v)", SELF)
    right = run(apart.SerializeToString(), [qkv[:, :, :, i].reshape(B, S, H * D) for i in range(3)])[0]
    converted = ir.from_proto(whole)
    contrib_twin.write_out(converted)
    assert [v.name for v in converted.graph.outputs] == [v.name for v in whole.graph.output]
    np.testing.assert_array_equal(run(ir.to_proto(converted).SerializeToString(), [qkv])[0], right)


def test_the_softmax_of_a_biased_sum_is_that_of_numpy() -> None:
    proto = optimized.parse(
        "main (float[2, 3, 5] x, float[1, 3, 5] m) => (float[2, 3, 5] p) {\n"
        " p = com.microsoft.BiasSoftmax <axis = 2, is_inner_broadcast = 0> (x, m) }"
    )
    x, m = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(2, 3, 5), (1, 3, 5)]))
    weights = np.exp(x + m)
    converted = ir.from_proto(proto)
    contrib_twin.write_out(converted)
    got = run(ir.to_proto(converted).SerializeToString(), [x.astype(np.float32), m.astype(np.float32)])[0]
    np.testing.assert_allclose(got, weights / weights.sum(-1, keepdims=True), rtol=1e-5)


def test_a_comparison_says_which_operator_runs_nowhere_here(tmp_path: Path) -> None:
    """flash-trt compares files as they stand, in the runtime that they are for."""
    outcome(CASES["inner"], tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "flash_trt", "compare", "out.onnx", "in.onnx"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_UNSUPPORTED, done.stderr
    message = done.stderr.partition("error: ")[2].splitlines()
    assert message[0] == "ONNX Runtime cannot load the reference model"
    assert [line.split()[0] for line in message[1:5]] == ["where", "got", "need", "do"]
    assert "BiasSoftmax" in message[2]
