# SPDX-License-Identifier: Apache-2.0
"""Quantized products of attention are refused by name, in either form of file; quantized projections stay fused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime
import pytest
from exporter import graphs
from exporter.graphs import code, fuse, model, only
from exporter.torch_exports import run
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static

from flash_export.find import find
from flash_export.patterns.quantized import QUANTIZE_AFTERWARDS

SPLIT = graphs.CONSTANTS + ", float tick = {0.03125}, int8 middle = {0}, int64[4] apart = {0, 0, 4, 8}"
ROWS = "float[B, S, 32] q, float[B, T, 32] k, float[B, T, 32] v"


def rounded(before: str, after: str) -> str:
    """The value ``before`` as 8-bit integers and back, under the name ``after``."""
    return (
        f"{before}_low = QuantizeLinear ({before}, tick, middle)\n"
        f"{after} = DequantizeLinear ({before}_low, tick, middle)\n"
    )


def quantized(which: str, *, early: bool) -> str:
    """Attention with one quantized operand: right before the product, or before heads are split (``early``)."""
    body = ""
    for name in "qkv":
        value = name
        if early and name == which:
            body += rounded(name, "round")
            value = "round"
        body += f"{name}4 = Reshape ({value}, apart)\n {name}t = Transpose <perm = [0, 2, 1, 3]> ({name}4)\n"
    names = {name: f"{name}t" for name in "qkv"}
    body += f"kt4 = Transpose <perm = [0, 1, 3, 2]> ({names['k']})\n"
    names["k"] = "kt4"
    if not early:
        body += rounded(names[which], "round")
        names[which] = "round"
    return body + (
        f"scores = MatMul ({names['q']}, {names['k']})\n scaled = Mul (scores, scale)\n"
        f"probs = Softmax <axis = -1> (scaled)\n out = MatMul (probs, {names['v']})\n"
    )


@pytest.mark.parametrize("early", [False, True], ids=["at_the_product", "above_layout"])
@pytest.mark.parametrize("which", "qkv")
def test_an_operand_that_is_dequantized_before_its_product_is_refused(which: str, early: bool) -> None:
    proto = model(quantized(which, early=early), inputs=ROWS, constants=SPLIT)
    fused, sites = fuse(proto)
    reason = only(sites).reason
    assert reason is not None, only(sites).status
    assert (reason.code, reason.action) == ("quantized", QUANTIZE_AFTERWARDS)
    assert f"operand of {'out' if which == 'v' else 'scores'} " in reason.text
    assert fused.graph.node == ir.to_proto(ir.from_proto(proto)).graph.node


PARTS = {
    "Split": "q3, k3, v3 = Split <axis = 2, num_outputs = 3> (all)\n",
    "Slice": "".join(f"{n}3 = Slice (all, at{i}, at{i + 1}, ax2)\n" for i, n in enumerate("qkv")),
    "Gather": "parts = Reshape (all, three)\n"
    + "".join(f"{n}3 = Gather <axis = 2> (parts, i{i})\n" for i, n in enumerate("qkv")),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_packed_projection_that_is_dequantized_as_a_whole_is_refused(part: str) -> None:
    body = rounded("x", "all") + PARTS[part]
    body += "".join(f"{n}4 = Reshape ({n}3, apart)\n {n} = Transpose <perm = [0, 2, 1, 3]> ({n}4)\n" for n in "qkv")
    constants = (
        SPLIT + ", int64[4] three = {0, 0, 3, 32}" + "".join(f", int64[1] at{i} = {{{32 * i}}}" for i in range(4))
    )
    plain = body.replace(rounded("x", "all"), "all = Identity (x)\n")
    text = {"inputs": "float[B, S, 96] x", "outputs": "float[B, 4, S, 8] out", "constants": constants}
    assert code(model(plain + graphs.PLAIN, **text)) == "fused"
    assert code(model(body + graphs.PLAIN, **text)) == "quantized"


def test_the_standard_operator_on_dequantized_operands_is_refused_too() -> None:
    body = rounded("k", "round") + "out = Attention (q, round, v)\n"
    assert code(model(body, constants=SPLIT, opset=23)) == "quantized"
    flat = rounded("k", "round") + "out = Attention <q_num_heads = 4, kv_num_heads = 4> (q, round, v)\n"
    proto = model(flat, inputs=ROWS, outputs="float[B, S, 32] out", constants=SPLIT, opset=23)
    assert code(proto) == "quantized"


@pytest.mark.parametrize("also", ["weights", "activations"])
def test_projections_with_dequantized_weights_stay_fused(also: str) -> None:
    """A quantized Linear before attention: its own MatMul lies between DequantizeLinear and the products."""
    body = rounded("x", "xr") if also == "activations" else "xr = Identity (x)\n"
    for name in "qkv":
        body += f"w{name}r = DequantizeLinear (w{name}, tick, middle)\n {name}0 = MatMul (xr, w{name}r)\n"
    body += graphs.SPLIT_HEADS + graphs.PLAIN
    random = np.random.default_rng(5)
    weights = "".join(f", int8[32, 32] w{n} = {{{', '.join(map(str, random.integers(-9, 9, 1024)))}}}" for n in "qkv")
    constants = graphs.SHAPES + ", float tick = {0.03125}, int8 middle = {0}" + weights
    proto = model(body, inputs="float[B, S, 32] x", outputs="float[B, 4, S, 8] out", constants=constants)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    expected, got = graphs.both(proto, fused, [random.standard_normal((2, 5, 32)).astype(np.float32)])
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


class Batches(CalibrationDataReader):
    """Three random batches, the same for every reader."""

    def __init__(self) -> None:
        random = np.random.default_rng(6)
        self._left = [{"x": random.standard_normal((2, 5, 32)).astype(np.float32)} for _ in range(3)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


def projected() -> onnx.ModelProto:
    """Attention behind three projections, every node named: what a quantizer takes."""
    body = graphs.HEADS + graphs.SPLIT_HEADS + graphs.PLAIN
    plain = model(body, inputs=graphs.PROJECTED, outputs="float[B, 4, S, 8] out", constants=graphs.SHAPES)
    random = np.random.default_rng(7)
    for name in ("wq", "wk", "wv"):
        plain.graph.input.remove(next(i for i in plain.graph.input if i.name == name))
        weight = (random.standard_normal((32, 32)) / 5).astype(np.float32)
        plain.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    for node in plain.graph.node:
        node.name = f"node_{node.output[0]}"
    return plain


def test_the_way_out_works_a_fused_file_can_be_quantized_and_its_node_stays(tmp_path: Path) -> None:
    """ONNX Runtime's quantizer with the fused file gives what it gives with the unfused one, the products left out."""
    plain, random = projected(), np.random.default_rng(8)
    x = random.standard_normal((3, 7, 32)).astype(np.float32)
    results = []
    for name, proto in (("plain", plain), ("fused", fuse(plain)[0])):
        source, low = tmp_path / f"{name}.onnx", tmp_path / f"{name}.int8.onnx"
        onnx.save(proto, source)
        products = [n.name for n in proto.graph.node if n.output[0] in ("scores", "out")]
        quantize_static(source, low, Batches(), op_types_to_quantize=["MatMul"], nodes_to_exclude=products)
        site = only(find(ir.load(low)))
        expected = "quantized" if name == "plain" else None  # Q, K and V are dequantized right before the products
        assert (site.reason.code if site.reason else None) == expected
        operators = [n.op_type for n in ir.load(low).graph]
        assert operators.count("FlashAttention") == (name == "fused")
        assert operators.count("DequantizeLinear") == 7  # x, three weights and what they make
        results.append(run(str(low), [x])[0])
    np.testing.assert_allclose(results[1], results[0], atol=3e-6, rtol=0)


def test_attention_with_every_tensor_quantized_is_refused_not_overlooked() -> None:
    """As a quantizer of all operators leaves it: a pair of Q and DQ, with scales of their own, behind every node."""

    def chain(*lines: str) -> str:
        body = ""
        for line in lines:
            name = line.partition(" = ")[0]
            body += line.replace(name, f"{name}_exact", 1) + "\n" + rounded(f"{name}_exact", name)
        return body

    head = "kt4 = Transpose <perm = [0, 1, 3, 2]> (k)"
    scores = ("scores = MatMul (q, kt4)", "scaled = Mul (scores, scale)", "masked = Where (m, hidden, scaled)")
    inputs = graphs.QKV + ", bool[S, T] m"
    after = "".join(f"more{i} = Add ({'masked' if not i else f'more{i - 1}'}, zero)\n" for i in range(4))
    body = (
        chain(head, *scores, *after.splitlines(), "probs = Softmax <axis = -1> (more3)") + "out = MatMul (probs, v)\n"
    )
    proto = model(body, inputs=inputs, constants=SPLIT)
    assert code(proto) == "quantized"
    assert fuse(proto)[0].graph.node == ir.to_proto(ir.from_proto(proto)).graph.node


def test_a_quantized_softmax_of_a_classifier_stays_no_attention() -> None:
    body = "h = Add (q, zero)\n" + rounded("h", "hr") + "probs = Softmax <axis = -1> (hr)\n" + rounded("probs", "out")
    assert code(model(body, inputs="float[B, 4, S, 8] q", constants=SPLIT)) == "not_attention"


@pytest.mark.parametrize(
    "operators",
    [None, ["MatMul"], ["MatMul", "Softmax"], ["MatMul", "Mul"]],
    ids=["all", "products", "softmax", "scale"],
)
def test_products_of_integers_are_refused_by_name(operators: list[str] | None, tmp_path: Path) -> None:
    """ONNX Runtime's quantizer in its QOperator format: QLinearMatMul, QLinearMul, QLinearSoftmax."""
    source, low = tmp_path / "plain.onnx", tmp_path / "low.onnx"
    onnx.save(projected(), source)
    quantize_static(source, low, Batches(), quant_format=QuantFormat.QOperator, op_types_to_quantize=operators)
    quantized_model = ir.load(low)
    assert [n.op_type for n in quantized_model.graph].count("QLinearMatMul") == 5
    reason = only(find(quantized_model)).reason
    assert reason is not None
    assert (reason.code, reason.action) == ("quantized", QUANTIZE_AFTERWARDS)


@pytest.mark.parametrize("optimized", [False, True])
def test_products_quantized_as_they_run_are_refused_by_name(optimized: bool, tmp_path: Path) -> None:
    """MatMulInteger behind DynamicQuantizeLinear, and what ONNX Runtime's optimizer makes of the two."""
    source, low, after = (tmp_path / f"{name}.onnx" for name in ("plain", "low", "after"))
    onnx.save(projected(), source)
    quantize_dynamic(source, low, extra_options={"MatMulConstBOnly": False})
    if optimized:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(after)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        onnxruntime.InferenceSession(str(low), options, providers=["CPUExecutionProvider"])
    found = ir.load(after if optimized else low)
    assert ("DynamicQuantizeMatMul" in [n.op_type for n in found.graph]) == optimized
    reason = only(find(found)).reason
    assert reason is not None
    assert reason.code == "quantized"


def test_scores_alone_that_are_products_of_integers_are_refused_as_such() -> None:
    body = (
        "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n q8, qs, qz = DynamicQuantizeLinear (q)\n"
        "k8, ks, kz = DynamicQuantizeLinear (kt)\n whole = MatMulInteger (q8, k8, qz, kz)\n"
        "number = Cast <to = 1> (whole)\n both = Mul (qs, ks)\n masked = Mul (number, both)\n"
    )
    _, sites = fuse(model(body + graphs.REST))
    reason = only(sites).reason
    assert reason is not None
    assert (reason.code, reason.text) == ("quantized", "MatMulInteger lies in the scores")


def test_a_softmax_of_integers_in_a_classifier_is_no_attention() -> None:
    text = """
    <ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>
    main (uint8[B, 32] x) => (uint8[B, 32] out) <float s = {0.1}, uint8 z = {0}>
    { h = QLinearMatMul (x, s, z, w, s, z, s, z)
      out = com.microsoft.QLinearSoftmax <axis = -1, opset = 13> (h, s, z, s, z) }
    """
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((32, 32), np.uint8), "w"))
    assert code(proto) == "not_attention"
