# SPDX-License-Identifier: Apache-2.0
"""Q, K and V of unequal types are refused with who has which, and the node that made it so."""

from __future__ import annotations

import io

import onnx
import pytest
from exporter.graphs import fuse, model, only
from rich.console import Console

from flash_export import report
from flash_export.sites import Refusal, Site

ROTATED = (
    "wide_q = Cast <to = 1> (q0)\n a = Mul (wide_q, cos)\n b = Mul (wide_q, sin)\n q = Add (a, b)\n"
    "wide_k = Cast <to = 1> (k0)\n c = Mul (wide_k, cos)\n d = Mul (wide_k, sin)\n k = Add (c, d)\n"
)
ATTENTION = (
    "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n scores = MatMul (q, kt)\n scaled = Mul (scores, scale)\n"
    "p = Softmax <axis = -1> (scaled)\n probs = Cast <to = {half}> (p)\n out = MatMul (probs, v)\n"
)
INPUTS = "{t}[B, 4, S, 8] q0, {t}[B, 4, S, 8] k0, {t}[B, 4, S, 8] v, float[S, 8] cos, float[S, 8] sin"


def _named(proto: onnx.ModelProto) -> onnx.ModelProto:
    for node in proto.graph.node:
        node.name = f"n_{node.output[0]}"
    return proto


@pytest.mark.parametrize(("kind", "number", "short"), [("float16", 10, "fp16"), ("bfloat16", 16, "bf16")])
def test_tables_of_fp32_are_told_by_the_node_that_widened_q(kind: str, number: int, short: str) -> None:
    body, inputs = ROTATED + ATTENTION.format(half=number), INPUTS.format(t=kind)
    proto = _named(model(body, inputs=inputs, outputs=f"{kind}[B, 4, S, 8] out"))
    reason = only(fuse(proto)[1]).reason
    assert reason is not None
    assert reason.code == "dtype"
    assert reason.text == f"Q and K are fp32, V and the output {short}; Q is cast to fp32 for a Mul"
    assert reason.node == "n_wide_q"
    assert "cast q and k to v's type after the rotation, or cos and sin to x.dtype" in reason.action


def test_the_way_out_is_one() -> None:
    """The same with q and k cast back is fused."""
    body = ROTATED.replace(" q = Add (a, b)", " qw = Add (a, b)\n q = Cast <to = 10> (qw)")
    body = body.replace(" k = Add (c, d)", " kw = Add (c, d)\n k = Cast <to = 10> (kw)")
    attention = ATTENTION.format(half=10).replace("scaled = Mul (scores, scale)", "scaled = Cast <to = 1> (scores)")
    proto = model(body + attention, inputs=INPUTS.format(t="float16"), outputs="float16[B, 4, S, 8] out")
    assert only(fuse(proto)[1]).status == "fused"


def test_types_without_such_a_node_are_told_as_they_are() -> None:
    inputs = "double[B, 4, S, 8] q, double[B, 4, S, 8] k, double[B, 4, S, 8] v"
    body = ATTENTION.format(half=11).replace("scaled = Mul (scores, scale)", "scaled = Identity (scores)")
    proto = _named(model(body, inputs=inputs, outputs="double[B, 4, S, 8] out"))
    reason = only(fuse(proto)[1]).reason
    assert reason is not None
    assert reason.text == "Q, K, V and the output are double"
    assert "fp32, fp16 or bf16" in reason.action
    inputs = "float[B, 4, S, 8] q, float16[B, 4, S, 8] k0, float[B, 4, S, 8] v"
    body = (
        "k = Identity (k0)\n kt = Transpose <perm = [0, 1, 3, 2]> (k)\n"
        "q16 = Cast <to = 10> (q)\n half_two = Cast <to = 10> (two)\n qs = Mul (q16, half_two)\n"
        "scores = MatMul (qs, kt)\n scaled = Cast <to = 1> (scores)\n"
        "p = Softmax <axis = -1> (scaled)\n out = MatMul (p, v)\n"
    )
    proto = model(body, inputs=inputs, outputs="float[B, 4, S, 8] out", constants="float two = {2.0}")
    reason = only(fuse(proto)[1]).reason
    assert reason is not None
    assert reason.text.startswith("Q is fp16 or fp32, K fp16, V and the output fp32"), reason.text


def test_the_terminal_says_where_once_for_all_layers() -> None:
    sites = [
        Site(f"layer{i}/Softmax", "refused", Refusal("dtype", "Q is fp32", f"layer{i}/Cast", "cast it"))
        for i in range(3)
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.as_table(sites))
    told = console.export_text()
    assert "dtype (3 x): Q is fp32" in told
    assert "at: layer0/Cast, and 2 more" in told
    alone = Console(width=120, record=True, file=io.StringIO())
    alone.print(report.as_table([Site("a/Softmax", "refused", Refusal("sink", "no", "a/Softmax", "do"))]))
    assert "at:" not in alone.export_text(), "the table has that name"
