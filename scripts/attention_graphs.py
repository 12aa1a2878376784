# SPDX-License-Identifier: Apache-2.0
"""Ways to write attention in ONNX, unfused and as a FlashAttention node, for memory_table.py.

query, key, value [1, 8, S, D] (and mask bool [1, 8, S, S]) -> output [1, 8, S, D] (and lse [1, 8, S]).
"""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from flash_export.op import DOMAIN, LAYOUT_BHSD, OPERATORS, Attributes

BATCH, HEADS, HEAD_DIM, LARGE_HEAD_DIM = 1, 8, 64, 320
SCALE = HEAD_DIM**-0.5
CAP = 30.0
SINKS = np.linspace(-1, 1, HEADS)
OPSET = 18

Graph = tuple[list[onnx.NodeProto], list[onnx.TensorProto]]
"""Nodes and constants."""


def scores(dtype: int, *, upcast: bool = False, scale: float = SCALE) -> Graph:
    """``scores`` [1, 8, S, S] = ``scale`` * query . key^T, in fp32 when ``upcast``."""
    query, key = ("query_wide", "key_wide") if upcast else ("query", "key")
    casts = [
        helper.make_node("Cast", ["query"], [query], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["key"], [key], to=TensorProto.FLOAT),
    ]
    nodes = [
        helper.make_node("Transpose", [key], ["key_transposed"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", [query, "key_transposed"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scores"]),
    ]
    return (casts if upcast else []) + nodes, [constant("scale", scale, TensorProto.FLOAT if upcast else dtype)]


def weighted_values(of: str, dtype: int, *, upcast: bool = False) -> list[onnx.NodeProto]:
    """``output`` = softmax(``of``) . value."""
    cast = [helper.make_node("Cast", ["probs"], ["probs_narrow"], to=dtype)]
    return [
        helper.make_node("Softmax", [of], ["probs"], axis=-1),
        *(cast if upcast else []),
        helper.make_node("MatMul", ["probs_narrow" if upcast else "probs", "value"], ["output"]),
    ]


def upcast_scores(dtype: int) -> Graph:
    """Attention whose query and key are upcast to fp32 for the scores and the softmax."""
    nodes, constants = scores(dtype, upcast=True)
    return nodes + weighted_values("scores", dtype, upcast=True), constants


def causal(dtype: int, scale: float = SCALE) -> Graph:
    """Attention whose mask is computed from the length, as exporters write it."""
    nodes, constants = scores(dtype, scale=scale)
    mask = [
        helper.make_node("Shape", ["query"], ["length"], start=2, end=3),
        helper.make_node("Squeeze", ["length"], ["count"]),
        helper.make_node("Range", ["zero", "count", "one"], ["keys"]),
        helper.make_node("Unsqueeze", ["keys", "last_axis"], ["rows"]),
        helper.make_node("LessOrEqual", ["keys", "rows"], ["visible"]),
        helper.make_node("Where", ["visible", "scores", "hidden"], ["masked"]),
    ]
    constants += [
        constant("zero", 0, TensorProto.INT64),
        constant("one", 1, TensorProto.INT64),
        constant("last_axis", [1], TensorProto.INT64),
        constant("hidden", -np.inf, dtype),
    ]
    return nodes + mask + weighted_values("masked", dtype), constants


def with_lse(dtype: int) -> Graph:
    """Attention that also gives the log-sum-exp of its scores, as ring attention and split prefills need it."""
    nodes, constants = scores(dtype)
    lse = [
        helper.make_node("ReduceLogSumExp", ["scores", "keys_axis"], ["lse_narrow"], keepdims=0),
        helper.make_node("Cast", ["lse_narrow"], ["lse"], to=TensorProto.FLOAT),
    ]
    constants.append(constant("keys_axis", [-1], TensorProto.INT64))
    return nodes + lse + weighted_values("scores", dtype), constants


def softcapped(dtype: int) -> Graph:
    """Attention whose scores are capped: CAP * tanh(score / CAP)."""
    nodes, constants = scores(dtype)
    cap = [
        helper.make_node("Div", ["scores", "cap"], ["shrunk"]),
        helper.make_node("Tanh", ["shrunk"], ["bent"]),
        helper.make_node("Mul", ["bent", "cap"], ["capped"]),
    ]
    return nodes + cap + weighted_values("capped", dtype), [*constants, constant("cap", CAP, dtype)]


def with_sinks(dtype: int) -> Graph:
    """Attention with one more score a head that takes its share of the softmax and has no value."""
    nodes, constants = scores(dtype)
    sink = [
        helper.make_node("Shape", ["query"], ["rows"], start=0, end=3),
        helper.make_node("Concat", ["rows", "one_column"], ["column"], axis=0),
        helper.make_node("Expand", ["sink", "column"], ["sink_column"]),
        helper.make_node("Concat", ["scores", "sink_column"], ["with_sink"], axis=-1),
        helper.make_node("Softmax", ["with_sink"], ["all_probs"], axis=-1),
        helper.make_node("Slice", ["all_probs", "first", "before_last", "keys_axis"], ["probs"]),
        helper.make_node("MatMul", ["probs", "value"], ["output"]),
    ]
    constants += [
        constant("sink", SINKS[:, None, None], dtype),
        constant("one_column", [1], TensorProto.INT64),
        constant("first", [0], TensorProto.INT64),
        constant("before_last", [-1], TensorProto.INT64),
        constant("keys_axis", [3], TensorProto.INT64),
    ]
    return nodes + sink, constants


def legacy_sdpa() -> Graph:
    """What torch.onnx's legacy exporter makes of PyTorch's own causal attention in fp16.

    It forgets a type, so that mask, softmax and the second product are in fp32; a last Cast repairs the output.
    """

    class Model(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    tensors = (torch.zeros(BATCH, HEADS, 2, HEAD_DIM, dtype=torch.float16),) * 3
    axes = {name: {2: "seq"} for name in ("query", "key", "value")}
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells that it is the legacy one
        torch.onnx.export(
            Model(), tensors, written, dynamo=False, opset_version=OPSET, input_names=list(axes), dynamic_axes=axes
        )
    graph = onnx.load_model_from_string(written.getvalue()).graph
    graph.node[-1].output[0] = "wide"
    return [*graph.node, helper.make_node("Cast", ["wide"], ["output"], to=TensorProto.FLOAT16)], [*graph.initializer]


def standard_masked() -> Graph:
    """ONNX's own Attention with a boolean mask for each head."""
    return [helper.make_node("Attention", ["query", "key", "value", "mask"], ["output"], scale=SCALE)], []


def flash(**attributes: float) -> Graph:
    """One FlashAttention node."""
    values = Attributes(q_num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE, layout=LAYOUT_BHSD, **attributes)
    node = helper.make_node(
        "FlashAttention", ["query", "key", "value"], ["output"], name="attention", domain=DOMAIN, **values.as_dict()
    )
    return [node], []


def flash_extended(dtype: int, sinks: np.ndarray | None = None, *, masked: bool = False) -> Graph:
    """One FlashAttentionEx node, whose side inputs are neutral but for ``sinks`` [8] and a bias made of ``mask``."""
    operator = OPERATORS["FlashAttentionEx"]
    sides = {"has_sinks": int(sinks is not None), "has_bias": int(masked)}
    values = Attributes(q_num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE, layout=LAYOUT_BHSD, **sides)
    node = helper.make_node(
        operator.name, operator.inputs, operator.outputs, name="attention", domain=DOMAIN, **values.as_dict()
    )
    constants = [
        constant("kv_lengths", [np.iinfo(np.int32).max], TensorProto.INT32),
        constant("sinks", [-np.inf] if sinks is None else sinks, TensorProto.FLOAT),
    ]
    if not masked:
        return [node], [*constants, constant("bias", np.zeros((1, 1, 1, 1)), dtype)]
    bias = helper.make_node("Where", ["mask", "seen", "hidden"], ["bias"])
    return [bias, node], [*constants, constant("seen", 0, dtype), constant("hidden", -np.inf, dtype)]


def constant(name: str, value: object, dtype: int) -> onnx.TensorProto:
    """An initializer."""
    return numpy_helper.from_array(np.array(value, helper.tensor_dtype_to_np_dtype(dtype)), name)
