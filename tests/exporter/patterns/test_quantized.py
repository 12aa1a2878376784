# SPDX-License-Identifier: Apache-2.0
"""QuantizeLinear and DequantizeLinear around attention's products: refused; around its projections: fused."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import code, fuse, model, only

from flash_export.sites import Site

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


def refusal(site: Site) -> tuple[str, str]:
    assert site.reason is not None, site.status
    return site.reason.code, site.reason.action


@pytest.mark.parametrize("early", [False, True], ids=["at_the_product", "above_layout"])
@pytest.mark.parametrize("which", "qkv")
def test_an_operand_that_is_dequantized_before_its_product_is_refused(which: str, early: bool) -> None:
    proto = model(quantized(which, early=early), inputs=ROWS, constants=SPLIT)
    fused, sites = fuse(proto)
    reason, action = refusal(only(sites))
    product = "out" if which == "v" else "scores"
    assert (reason, f"{product} among nodes_to_exclude" in action) == ("quantized", True)
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
