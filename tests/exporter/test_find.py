# SPDX-License-Identifier: Apache-2.0
"""Every softmax and attention operator ends as fused, refused with its own reason, or no attention."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from exporter import graphs
from exporter.graphs import (
    HEADS,
    JOIN,
    PLAIN,
    SHAPES,
    SPLIT_HEADS,
    attention,
    both,
    code,
    fuse,
    model,
    numbers,
    only,
    renamed,
)
from exporter.torch_exports import Wrapped, export, run

from flash_export.find import find
from flash_export.rewrite import rewrite

NOT_ATTENTION = {
    "classifier": ("out = Softmax <axis = -1> (x)\n", "float[B, 7] x", "float[B, 7] out"),
    "linear_head": ("y = MatMul (x, w)\n out = Softmax (y)\n", "float[B, 8] x", "float[B, 7] out"),
    "gate": (
        "y = MatMul (x, w)\n g = Softmax (y)\n out = Mul (g, x7)\n",
        "float[B, 8] x, float[B, 7] x7",
        "float[B, 7] out",
    ),
    "gate_that_is_also_an_output": (
        "y = MatMul (x, w)\n g = Softmax (y)\n g2 = Identity (g)\n m = MatMul (g, e)\n n = MatMul (g2, e)\n"
        "out = Add (m, n)\n",
        "float[B, 8] x, float[7, 5] e",
        "float[B, 5] out",
    ),
    "similarity": ("y = MatMul (x, z)\n out = Softmax (y)\n", "float[B, 8] x, float[8, 5] z", "float[B, 5] out"),
    "mixture": (
        "y = MatMul (x, w)\n g = Softmax (y)\n out = MatMul (g, e)\n",
        "float[B, 8] x, float[7, 5] e",
        "float[B, 5] out",
    ),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_a_softmax_that_weighs_no_values_by_scores_is_no_attention(name: str) -> None:
    body, inputs, outputs = NOT_ATTENTION[name]
    proto = model(body, inputs=inputs + ", float[8, 7] w", outputs=outputs)
    weights = onnx.numpy_helper.from_array(np.ones((8, 7), np.float32), "w")
    proto.graph.input.remove(next(i for i in proto.graph.input if i.name == "w"))
    proto.graph.initializer.append(weights)
    assert code(proto) == "not_attention"


def test_scores_or_probabilities_that_are_an_output_are_refused_with_what_is_used() -> None:
    outputs = graphs.OUT + ", float[B, 4, S, T] "
    assert code(model(PLAIN, outputs=outputs + "probs")) == "probabilities_used"
    assert code(model(PLAIN, outputs=outputs + "scaled")) == "scores_used"
    assert code(model(PLAIN + "more = Relu (probs)\n", outputs=outputs + "more")) == "probabilities_used"


@pytest.mark.parametrize("outside", ["lse", "gated"])
def test_scores_whose_log_sum_exp_is_read_too_are_refused(outside: str) -> None:
    """As the eager form of a model with a gate on its attention writes it: an output, or a factor on the result."""
    body = (
        "keep = LessOrEqual (j, i)\n masked = Where (keep, scaled, hidden)\n" + graphs.REST + "\n"
        "lse = ReduceLogSumExp <keepdims = 1> (masked, last)\n share = Sigmoid (lse)\n gated = Mul (out, share)\n"
    )
    proto = model(
        graphs.LENGTHS + graphs.PRODUCT + body,
        outputs=f"{graphs.OUT}, float[B, 4, S, {1 if outside == 'lse' else 8}] {outside}",
        constants=graphs.CONSTANTS + ", int64[1] last = {-1}",
    )
    if outside == "gated":
        del proto.graph.output[0]
    assert code(proto) == "scores_used"


def test_probabilities_that_a_branch_captures_are_used() -> None:
    branches = (
        "then_branch = a () => (float[B, 4, S, T] r) { r = Relu (probs) }, "
        "else_branch = b () => (float[B, 4, S, T] e) { e = Neg (probs) }"
    )
    proto = model(
        PLAIN + f"more = If (go) <{branches}>\n",
        inputs=graphs.QKV + ", bool go",
        outputs=graphs.OUT + ", float[B, 4, S, T] more",
    )
    assert code(proto) == "probabilities_used"
    assert "for the output more;" in reason(proto)


def reason(proto: onnx.ModelProto) -> str:
    (site,) = find(ir.from_proto(proto))
    assert site.reason is not None
    return site.reason.text


def test_the_outputs_that_use_scores_or_probabilities_are_named() -> None:
    outputs = graphs.OUT + ", float[B, 4, S, T] "
    aside = "less = Neg (probs)\n more = Relu (less)\n"
    for body, what, named in (
        (PLAIN, "probs", '"probs" are an output of the graph;'),
        (PLAIN + aside, "more", "for the output more;"),
        (PLAIN + "more = Relu (scaled)\n", "more", "for the output more;"),
    ):
        text = reason(model(body, outputs=outputs + what))
        assert named in text
        assert "for the outputs" not in text
    many = ", ".join(f"float[B, 4, S, T] o{i}" for i in range(6))
    body = PLAIN + "".join(f"o{i} = Relu (probs)\n" for i in range(6))
    assert "for the outputs o0, o1, o2, o3 and 2 more;" in reason(model(body, outputs=f"{graphs.OUT}, {many}"))
    wide = {"inputs": graphs.QKV + ", float[B, 4, T, N] w", "outputs": graphs.OUT + ", float[B, 4, S, N] more"}
    twice = model(PLAIN + "more = MatMul (probs, w)\n", **wide)  # its head dim is dynamic: no attention of its own
    assert "also read by another product; " in reason(twice)


def test_the_shape_of_a_value_between_product_and_output_may_be_asked_for() -> None:
    """The legacy exporter computes the joining Reshape's target from the transposed output itself."""
    asked = JOIN.replace("out = Reshape (back, join)", "") + (
        "asked = Shape (back)\n b = Gather <axis = 0> (asked, i0)\n s = Gather <axis = 0> (asked, i1)\n"
        "b1 = Unsqueeze (b, ax0)\n s1 = Unsqueeze (s, ax0)\n target = Concat <axis = 0> (b1, s1, minus)\n"
        "out = Reshape (back, target)\n"
    )
    body = HEADS + SPLIT_HEADS + PLAIN.replace("out =", "out4 =") + asked
    constants = SHAPES + ", int64[1] minus = {-1}"
    proto = model(body, inputs=graphs.PROJECTED, outputs="float[B, S, 32] out", constants=constants)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    random = np.random.default_rng(3)
    inputs = [random.standard_normal(s).astype(np.float32) for s in ((2, 5, 32), *[(32, 32)] * 3)]
    expected, got = both(proto, fused, [x / 4 for x in inputs])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_attention_inside_a_branch_is_refused_as_subgraph_with_a_way_out() -> None:
    branch = (
        "then_branch = inner () => (float[B, 4, S, 8] r) {\n kt = Transpose <perm = [0, 1, 3, 2]> (k)\n"
        " s = MatMul (q, kt)\n p = Softmax <axis = -1> (s)\n r = MatMul (p, v)\n }"
    )
    other = "else_branch = other () => (float[B, 4, S, 8] e) { e = Identity (q) }"
    proto = model(f"out = If (go) <{branch}, {other}>\n", inputs=graphs.QKV + ", bool go")
    reason = only(find(ir.from_proto(proto))).reason
    assert reason is not None
    assert reason.code == "subgraph"
    assert "a branch of If" in reason.text
    assert "models of their own" in reason.action


def test_attention_inside_a_loop_is_refused_as_subgraph_with_a_way_out() -> None:
    """Layers that share their weights, run in a loop: the state is Q, K and V stay."""
    body = (
        "body = step (int64 turn, bool go_on, float[B, 4, S, 8] state) => (bool again, float[B, 4, S, 8] next) {\n"
        " again = Identity (go_on)\n kt = Transpose <perm = [0, 1, 3, 2]> (k)\n s = MatMul (state, kt)\n"
        " scaled = Mul (s, scale)\n p = Softmax <axis = -1> (scaled)\n next = MatMul (p, v)\n }"
    )
    proto = model(f"out = Loop (turns, yes, q) <{body}>\n", inputs=graphs.QKV + ", int64 turns")
    fused, sites = fuse(proto)
    reason = only(sites).reason
    assert reason is not None
    assert reason.code == "subgraph"
    assert "the body of Loop" in reason.text
    assert "unroll the loop" in reason.action
    assert fused.graph == ir.to_proto(ir.from_proto(proto)).graph
    inputs = [*numbers({"B": 2, "S": 5, "T": 7}), np.array(3)]
    expected, got = both(proto, fused, inputs)
    np.testing.assert_array_equal(got, expected)


def test_a_second_run_finds_the_nodes_and_changes_nothing() -> None:
    once, _ = fuse(attention("keep = LessOrEqual (j, i)\n masked = Where (keep, scaled, hidden)"))
    twice, sites = fuse(once)
    assert [s.status for s in sites] == ["fused"]
    assert only(sites).attributes is not None
    assert only(sites).operator == "FlashAttention"
    assert twice.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_names_and_node_order_do_not_matter(seed: int) -> None:
    proto = attention(
        "wide = Unsqueeze (pad, twice)\n keep = LessOrEqual (j, i)\n kept = And (wide, keep)\n"
        "bias = Where (kept, zero, hidden)\n masked = Add (bias, scaled)",
        inputs=graphs.QKV + ", bool[B, T] pad",
        constants=graphs.CONSTANTS + ", int64[2] twice = {1, 2}",
    )
    changed = renamed(proto, seed)
    onnx.checker.check_model(changed, full_check=True)
    (fused, sites), (_, others) = fuse(changed), fuse(proto)
    assert only(sites).attributes == only(others).attributes
    assert only(sites).bias_shape == only(others).bias_shape
    sizes = {"B": 2, "S": 5, "T": 7}
    pad = np.ones((2, 7), bool)
    pad[0, 5:] = False
    expected, got = both(proto, fused, [*numbers(sizes), pad])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_a_graph_of_ten_thousand_nodes_is_read_in_about_a_second() -> None:
    layers = 48
    constants = SHAPES + "".join(f", float[32, 32] w{n} = {{{','.join(['0.1'] * 1024)}}}" for n in "qkv")
    body = "x0 = Identity (x)\n"
    for i in range(layers):
        layer = HEADS + SPLIT_HEADS + PLAIN.replace("out =", "out4 =") + JOIN.replace("out =", "y =")
        layer += "t0 = Add (y, x)\n" + "".join(f"t{j + 1} = Relu (t{j})\n" for j in range(180))
        lines = [part.strip() for part in layer.splitlines()]
        made = [line.split(" = ")[0] for line in lines]
        for line in lines:
            words = line.replace("(", "( ").replace(")", " )").replace(",", " ,").split(" ")
            body += " ".join(f"{w}_{i}" if w in made else (f"x{i}" if w == "x" else w) for w in words) + "\n"
        body += f"x{i + 1} = Identity (t180_{i})\n"
    outputs = f"float[B, S, 32] x{layers}"
    text = f'<ir_version: 9, opset_import: ["" : 18]>\nmain (float[B, S, 32] x) => ({outputs})\n<{constants}>\n'
    converted = ir.from_proto(onnx.parser.parse_model(text.replace("-inf", "-1.0") + "{\n" + body + "}\n"))
    assert converted.graph.num_nodes() > 9000
    start = time.process_time()
    sites = find(converted)
    seconds = time.process_time() - start
    assert [s.status for s in sites] == ["fused"] * layers
    assert seconds < 3, seconds
    assert rewrite(converted, sites) == layers


def test_what_programs_share_is_kept_for_those_that_stay(tmp_path: Path) -> None:
    """One K for two attentions and as an output: both are fused, the output keeps its name and value."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key = k.transpose(-1, -2) * 2.0
        first = torch.softmax(q @ key, -1) @ v
        return torch.softmax(first @ key, -1) @ v, key

    inputs = [torch.from_numpy(x) for x in numbers({"B": 2, "S": 5, "T": 7})]
    export(Wrapped(forward), inputs, tmp_path / "shared.onnx", "dynamo18")
    converted = ir.load(tmp_path / "shared.onnx")
    names = [v.name for v in converted.graph.outputs]
    sites = find(converted)
    assert rewrite(converted, sites) == 2
    assert [v.name for v in converted.graph.outputs] == names
    got = run(ir.to_proto(converted).SerializeToString(), [x.numpy() for x in inputs])
    for output, right in zip(got, forward(*inputs), strict=True):
        np.testing.assert_allclose(output, right.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("deep", ["Identity (m{})", "Add (m{}, zero)", "Where (yes, m{}, hidden)"])
def test_a_chain_deeper_than_pythons_stack_is_refused_with_its_reason(deep: str) -> None:
    chain = "".join(f"m{i + 1} = {deep.format(i)}\n" for i in range(1500))
    lines = f"m0 = Identity (scaled)\n{chain}masked = Identity (m1500)"
    assert code(attention(lines)) == "too_deep"


def test_a_mask_deeper_than_pythons_stack_is_refused_with_its_reason() -> None:
    chain = "".join(f"n{i + 1} = Not (n{i})\n" for i in range(1500))
    lines = f"n0 = LessOrEqual (j, i)\n{chain}masked = Where (n1500, scaled, hidden)"
    assert code(attention(lines)) == "too_deep"
