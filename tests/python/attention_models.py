# SPDX-License-Identifier: Apache-2.0
"""Small ONNX models for the tests of flash_trt: one attention, unfused in standard ops or as a FlashAttention node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from flash_export.function_body import functions_for
from flash_export.op import DOMAIN, Attributes

HEADS = 3
HEAD_DIM = 20
SCALE = 0.3125  # exact in every float type
OPSET = 18
FLOAT, HALF, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16


def _model(
    nodes: list[onnx.NodeProto],
    dtype: int,
    *,
    constants: dict[str, np.ndarray] | None = None,
    outputs: dict[str, int] | None = None,
) -> onnx.ModelProto:
    shape = ["batch", HEADS, "seq", HEAD_DIM]
    inputs = [helper.make_tensor_value_info(name, dtype, shape) for name in ("query", "key", "value")]
    made = [helper.make_tensor_value_info(name, kind, shape) for name, kind in (outputs or {"output": dtype}).items()]
    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "attention", inputs, made, initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def unfused(
    path: Path,
    *,
    dtype: int = FLOAT,
    scale: float = SCALE,
    causal: bool = True,
    offset: int = 0,
    window: int | None = None,
) -> Path:
    """softmax(scale * query . key^T + mask) . value on [batch, 3, seq, 20]; row i sees key j where j <= i + offset.

    And where i - window <= j, if there is a window.
    """
    numpy_dtype = helper.tensor_dtype_to_np_dtype(dtype)
    constants = {
        "scale": np.array(scale, numpy_dtype),
        "hidden": np.array(-np.inf, numpy_dtype),
        "seen": np.array(0, numpy_dtype),
        "axis": np.array([2], np.int64),
        "zero": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "offset": np.array(offset, np.int64),
    }
    constants |= {"window": np.array(window, np.int64)} if window is not None else {}
    windowed = [
        helper.make_node("Sub", ["rows", "window"], ["first"]),
        helper.make_node("GreaterOrEqual", ["keys", "first"], ["near"]),
        helper.make_node("And", ["past", "near"], ["visible"]),
    ]
    mask = [
        helper.make_node("Shape", ["query"], ["length"], start=2, end=3),
        helper.make_node("Squeeze", ["length"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["keys"]),
        helper.make_node("Add", ["keys", "offset"], ["last"]),
        helper.make_node("Unsqueeze", ["last", "one_d"], ["rows"]),
        helper.make_node("LessOrEqual", ["keys", "rows"], ["visible" if window is None else "past"]),
        *(windowed if window is not None else []),
        helper.make_node("Where", ["visible", "seen", "hidden"], ["mask"]),
        helper.make_node("Add", ["scaled", "mask"], ["scores"]),
    ]
    constants["one_d"] = np.array([1], np.int64)
    nodes = [
        helper.make_node("Transpose", ["key"], ["key_t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "key_t"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scaled"]),
        *(mask if causal else [helper.make_node("Identity", ["scaled"], ["scores"])]),
        helper.make_node("Softmax", ["scores"], ["probs"], axis=-1),
        helper.make_node("MatMul", ["probs", "value"], ["output"]),
    ]
    onnx.save(_model(nodes, dtype, constants=constants), path)
    return path


def flash_node(
    inputs: tuple[str, str, str] = ("query", "key", "value"),
    output: str = "output",
    *,
    name: str = "attention",
    scale: float = SCALE,
    **attributes: int | float,
) -> onnx.NodeProto:
    """A FlashAttention node on [B, H, S, D], causal unless said otherwise."""
    values = Attributes(
        q_num_heads=HEADS, kv_num_heads=HEADS, scale=scale, layout=1, **({"causal": 1} | attributes)
    ).as_dict()
    return helper.make_node("FlashAttention", list(inputs), [output], name=name, domain=DOMAIN, **values)


def fused(path: Path, *nodes: onnx.NodeProto, dtype: int = FLOAT, fallback: bool = True, **parts: object) -> Path:
    """A model of ``nodes`` (one ordinary FlashAttention node by default) with the function bodies they need."""
    model = _model(list(nodes) or [flash_node()], dtype, **parts)
    if fallback:
        model = with_bodies(model)
    onnx.save(model, path)
    return path


def with_bodies(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with a function for every FlashAttention operator that it uses."""
    model = ir.from_proto(proto)
    for function in functions_for(list(ir.traversal.RecursiveGraphIterator(model.graph)), OPSET):
        model.functions[function.identifier()] = function
    return ir.to_proto(model)


def renamed(model: Path, name: str) -> Path:
    """The model of ``fused`` with another name for its input ``query``."""
    proto = onnx.load(model)
    for value in proto.graph.input:
        value.name = name if value.name == "query" else value.name
    for node in proto.graph.node:
        node.input[:] = [name if given == "query" else given for given in node.input]
    onnx.save(proto, model)
    return model
