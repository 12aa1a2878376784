# SPDX-License-Identifier: Apache-2.0
"""One attention in every way that ONNX Runtime knows: what the CPU's benchmark compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from flash_export.op import DOMAIN, LAYOUT_BHSD, LAYOUT_BSHD, OPERATORS, VERSION, Attributes

FLOAT = TensorProto.FLOAT
NO_LENGTH = np.array([2**31 - 1], np.int32)
MICROSOFT = "com.microsoft"


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Attention of batch 1 in fp32; an additive mask is of keys, ``[1, 1, 1, Skv]``, or full, ``[1, 1, Sq, Skv]``."""

    heads: int
    head_dim: int
    seqlen_q: int
    seqlen_kv: int
    causal: bool = False
    kv_heads: int = 0  # 0: as many as heads
    mask: str = ""  # "", "keys" or "full"

    @property
    def heads_kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def products(self) -> float:
        """Useful floating-point operations: those of visible keys."""
        pairs: float = self.seqlen_q * self.seqlen_kv
        if self.causal:
            pairs -= self.seqlen_q * (self.seqlen_q - 1) / 2
        return 4.0 * self.heads * self.head_dim * pairs

    @property
    def kv_bytes(self) -> int:
        """Of key and value."""
        return 8 * self.heads_kv * self.head_dim * self.seqlen_kv

    def arrays(self) -> dict[str, NDArray]:
        """query, key, value ``[1, H, S, D]`` and the mask."""
        rng = np.random.default_rng(1)
        sizes = {"query": (self.heads, self.seqlen_q), "key": (self.heads_kv, self.seqlen_kv)}
        sizes["value"] = sizes["key"]
        made = {n: rng.standard_normal((1, h, s, self.head_dim), np.float32) for n, (h, s) in sizes.items()}
        if self.mask:
            shape = (1, 1, self.seqlen_q if self.mask == "full" else 1, self.seqlen_kv)
            made["mask"] = rng.standard_normal(shape, np.float32)
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """A way to write a problem: its nodes, its inputs as it wants them, its constants."""

    nodes: list[onnx.NodeProto]
    inputs: dict[str, NDArray]
    constants: dict[str, NDArray] = dataclasses.field(default_factory=dict)
    output: str = "output"

    def model(self) -> onnx.ModelProto:
        """The model around it."""
        inputs = [helper.make_tensor_value_info(n, FLOAT, a.shape) for n, a in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(self.output, FLOAT, None)]
        constants = [numpy_helper.from_array(a, n) for n, a in self.constants.items()]
        opsets = [helper.make_opsetid(d, v) for d, v in (("", 23), (DOMAIN, VERSION), (MICROSOFT, 1))]
        graph = helper.make_graph(self.nodes, "attention", inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)  # noqa: TID251 - a few nodes, no rewriting


def joined(x: NDArray) -> NDArray:
    """``[1, H, S, D]`` as ``[1, S, H*D]``."""
    _, heads, seqlen, head_dim = x.shape
    return np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(1, seqlen, heads * head_dim)


def operator(problem: Problem, layout: int = LAYOUT_BHSD) -> Graph:
    """Our operator."""
    inputs = problem.arrays()
    mask = inputs.get("mask")
    if layout == LAYOUT_BSHD:
        inputs |= {name: joined(inputs[name]) for name in ("query", "key", "value")}
    name = "FlashAttention" if mask is None else "FlashAttentionEx"
    attributes = Attributes(
        q_num_heads=problem.heads,
        kv_num_heads=problem.heads_kv,
        scale=problem.head_dim**-0.5,
        layout=layout,  # type: ignore[arg-type]
        causal=int(problem.causal),
        diagonal=1,
        has_bias=int(mask is not None),
    ).as_dict()
    sides = [] if mask is None else ["mask", "lengths", "sinks"]
    node = helper.make_node(
        name, ["query", "key", "value", *sides], list(OPERATORS[name].outputs), domain=DOMAIN, **attributes
    )
    constants = {} if mask is None else {"lengths": NO_LENGTH, "sinks": np.array([-np.inf], np.float32)}
    return Graph([node], inputs, constants)


def operator_joined(problem: Problem) -> Graph:
    """Our operator on ``[B, S, H*D]``."""
    return operator(problem, LAYOUT_BSHD)


def decomposed(problem: Problem) -> Graph:
    """MatMul, Mul, Add, Softmax, MatMul, as exporters write it; the causal mask is a constant."""
    inputs = problem.arrays()
    constants = {"scale": np.array(problem.head_dim**-0.5, np.float32)}
    nodes = [
        helper.make_node("Transpose", ["key"], ["transposed"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "transposed"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scores"]),
    ]
    scores = "scores"
    if problem.causal:
        hidden = np.triu(np.full((problem.seqlen_q, problem.seqlen_kv), -np.inf, np.float32), 1)
        constants["causal"] = hidden
        nodes.append(helper.make_node("Add", [scores, "causal"], ["below"]))
        scores = "below"
    if "mask" in inputs:
        nodes.append(helper.make_node("Add", [scores, "mask"], ["masked"]))
        scores = "masked"
    nodes.append(helper.make_node("Softmax", [scores], ["probs"], axis=-1))
    nodes.append(helper.make_node("MatMul", ["probs", "value"], ["output"]))
    return Graph(nodes, inputs, constants)


def standard(problem: Problem) -> Graph:
    """The standard operator ``Attention``."""
    inputs = problem.arrays()
    mask = ["mask"] if "mask" in inputs else []
    node = helper.make_node("Attention", ["query", "key", "value", *mask], ["output"], is_causal=int(problem.causal))
    return Graph([node], inputs)


def multi_head(problem: Problem) -> Graph:
    """ONNX Runtime's ``MultiHeadAttention``."""
    given = problem.arrays()
    inputs = {name: joined(given[name]) for name in ("query", "key", "value")}
    node = helper.make_node(
        "MultiHeadAttention",
        list(inputs),
        ["output"],
        domain=MICROSOFT,
        num_heads=problem.heads,
        unidirectional=int(problem.causal),
    )
    return Graph([node], inputs)


def group_query(problem: Problem) -> Graph:
    """ONNX Runtime's ``GroupQueryAttention``, which is causal always."""
    given = problem.arrays()
    inputs = {name: joined(given[name]) for name in ("query", "key", "value")}
    constants = {
        "last": np.array([problem.seqlen_kv - 1], np.int32),
        "length": np.array(problem.seqlen_kv, np.int32),
    }
    node = helper.make_node(
        "GroupQueryAttention",
        [*inputs, "", "", "last", "length"],
        ["output", "present_key", "present_value"],
        domain=MICROSOFT,
        num_heads=problem.heads,
        kv_num_heads=problem.heads_kv,
    )
    return Graph([node], inputs, constants)


GRAPHS: dict[str, Callable[[Problem], Graph]] = {
    "operator": operator,
    "operator [B, S, H·D]": operator_joined,
    "decomposed": decomposed,
    "Attention": standard,
    "MultiHeadAttention": multi_head,
    "GroupQueryAttention": group_query,
}
"""Ways by the name that tables use."""


def takes(name: str, problem: Problem) -> bool:
    """Whether the way ``name`` can express the problem."""
    same_lengths = problem.seqlen_q == problem.seqlen_kv
    if name == "GroupQueryAttention":
        return problem.causal and not problem.mask and same_lengths
    if name == "MultiHeadAttention":
        return not problem.mask and not problem.kv_heads
    if name == "Attention":
        return problem.mask != "keys"  # its mask has every query's row
    if name == "decomposed":
        return not problem.kv_heads and (same_lengths or not problem.causal)
    return True
