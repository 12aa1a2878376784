# SPDX-License-Identifier: Apache-2.0
"""No node of ONNX Runtime's operators, whatever it is given, ends in anything but a status: no checker judges them."""

from __future__ import annotations

import random
from collections import Counter

import onnx.parser
import onnx_ir as ir

from flash_export.find import find
from flash_export.rewrite import rewrite

OPERATORS = {
    "Attention": "num_heads = {a}",
    "BiasSoftmax": "axis = {a}",
    "EmbedLayerNormalization": "epsilon = 0.1",
    "FusedMatMul": "alpha = 0.5, transB = 1",
    "GroupQueryAttention": "num_heads = {a}, kv_num_heads = {b}, do_rotary = {c}",
    "MatMulNBits": "N = {a}, K = {b}",
    "MultiHeadAttention": "num_heads = {a}",
    "SkipLayerNormalization": "epsilon = 0.1",
}
TYPES = (
    "float[B, S, 32]", "float[B, 4, S, 8]", "float[8]", "float", "float[B, S]", "int64[B, S]", "float[2, B, 4, S, 8]",
    "int32[B]", "float[B, S, 16]",
)  # fmt: skip


def nonsense(draw: random.Random) -> str:
    operator = draw.choice(list(OPERATORS))
    names = [draw.choice(["", *"uvwxyz"]) for _ in range(draw.randint(1, 12))]
    settings = OPERATORS[operator].format(
        a=draw.choice([0, 1, 4, -3, 100000]), b=draw.choice([0, 1, 2, -1]), c=draw.choice([0, 1])
    )
    inputs = ", ".join(f"{draw.choice(TYPES)} {name}" for name in "uvwxyz")
    return (
        f'<ir_version: 9, opset_import: ["" : {draw.choice([11, 13, 18])}, "com.microsoft" : 1]>\n'
        f"main ({inputs}) => (float[N] o) {{\n r, s, t = com.microsoft.{operator} <{settings}> ({', '.join(names)})\n"
        " o = Softmax (r) }"
    )


def test_nodes_with_nonsense_for_inputs_get_a_status_each() -> None:
    draw, seen = random.Random(0), Counter[str]()
    for _ in range(1500):
        text = nonsense(draw)
        model = ir.from_proto(onnx.parser.parse_model(text))
        try:
            sites = find(model)
            rewrite(model, sites)
        except Exception as error:
            raise AssertionError(text) from error
        seen.update(site.status for site in sites)
    assert seen["refused"] > 300
