# SPDX-License-Identifier: Apache-2.0
"""A decoder as ONNX Runtime GenAI's model builder and optimum write it: GroupQueryAttention with a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, KV_HEADS, DEPTH, WIDTH, WORDS, LAYERS = 4, 2, 16, 64, 50, 2
POSITIONS = 128


class _Builder:
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def weight(self, name: str, *shape: int, spread: float | None = None) -> str:
        array = self.random.standard_normal(shape) * (spread or shape[0] ** -0.5)
        return self.constant(name, array.astype(np.float32))

    def constant(self, name: str, array: object) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(self, kind: str, inputs: list[str], outputs: list[str] | str, domain: str = "", **attributes: object) -> str:
        names = [outputs] if isinstance(outputs, str) else outputs
        self.nodes.append(helper.make_node(kind, inputs, names, name=f"/{names[0]}", domain=domain, **attributes))
        return names[0]


def write(path: Path, total: str) -> None:
    """Writes the decoder; ``total`` is how the file calls the length of the cache after a step."""
    b = _Builder()
    batch, past = "batch_size", "past_sequence_length"
    ints, floats = TensorProto.INT64, TensorProto.FLOAT
    inputs = [
        helper.make_tensor_value_info("input_ids", ints, [batch, "sequence_length"]),
        helper.make_tensor_value_info("attention_mask", ints, [batch, total]),
    ]
    outputs = [helper.make_tensor_value_info("logits", floats, [batch, "sequence_length", WORDS])]
    axis, one, at = b.constant("axis", [1]), b.constant("one", [1]), b.constant("at", np.array(1))
    b.op("ReduceSum", [b.op("Cast", ["attention_mask"], "mask", to=ints), axis], "count", keepdims=0)
    b.op("Cast", [b.op("Sub", ["count", one], "last")], "seqlens_k", to=TensorProto.INT32)
    b.op("Gather", [b.op("Shape", ["attention_mask"], "mask_shape"), at], "length", axis=0)
    b.op("Cast", ["length"], "total_sequence_length", to=TensorProto.INT32)
    angles = np.arange(POSITIONS)[:, None] / 10000 ** (np.arange(DEPTH // 2) / (DEPTH // 2))
    tables = [b.constant(n, f(angles).astype(np.float32)) for n, f in (("cos_cache", np.cos), ("sin_cache", np.sin))]
    hidden = b.op("Gather", [b.weight("words", WORDS, WIDTH, spread=1.0), "input_ids"], "embedded")
    norm = {"epsilon": 1e-6}
    normed = b.op("SimplifiedLayerNormalization", [hidden, b.constant("g", np.ones(WIDTH, np.float32))], "n", **norm)
    for i in range(LAYERS):
        kv = [f"past_key_values.{i}.{which}" for which in ("key", "value")]
        now = [f"present.{i}.{which}" for which in ("key", "value")]
        inputs += [helper.make_tensor_value_info(n, floats, [batch, KV_HEADS, past, DEPTH]) for n in kv]
        outputs += [helper.make_tensor_value_info(n, floats, [batch, KV_HEADS, total, DEPTH]) for n in now]
        packed = b.op("MatMul", [normed, b.weight(f"qkv{i}", WIDTH, (HEADS + 2 * KV_HEADS) * DEPTH)], f"packed{i}")
        operands = [packed, "", "", *kv, "seqlens_k", "total_sequence_length", *tables]
        settings = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1}
        attended = b.op("GroupQueryAttention", operands, [f"attention{i}", *now], "com.microsoft", **settings)
        joined = b.op("MatMul", [attended, b.weight(f"o{i}", HEADS * DEPTH, WIDTH)], f"joined{i}")
        scale = b.constant(f"g{i}", np.ones(WIDTH, np.float32))
        names = [f"n{i}", "", "", f"hidden{i}"]
        normed = b.op("SkipSimplifiedLayerNormalization", [hidden, joined, scale], names, "com.microsoft", **norm)
        hidden = names[3]
    b.op("MatMul", [normed, b.weight("head", WIDTH, WORDS)], "logits")
    graph = helper.make_graph(b.nodes, "decoder", inputs, outputs, b.initializers)
    opsets = [helper.make_opsetid("", 14), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
