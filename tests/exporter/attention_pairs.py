# SPDX-License-Identifier: Apache-2.0
"""Unfused and fused models of several cross attentions, made by hand, and the faults that the check must catch.

One attention: query from ``x [b, s, E]``, key and value from ``y [b, t, E]``, padding mask ``keep [b, t]``; its output
is projected and added to ``x``. The fused twin has one FlashAttentionEx node instead and a body for it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flash_export.function_body import functions_for
from flash_export.op import DOMAIN, Attributes
from flash_export.sites import Site

Fault = Literal[
    "scale", "scale_half", "causal_kind", "mask_off_by_one", "mask_dropped", "key_value_swapped", "heads_permuted",
    "one_tile_wrong", "softcap_dropped",
]  # fmt: skip
Causal = Literal["none", "top_left", "bottom_right"]

DTYPES = {
    "fp32": (ir.DataType.FLOAT, np.float32),
    "fp16": (ir.DataType.FLOAT16, np.float16),
    "bf16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the attentions of one pair are like; every head dim and count odd or unusual on purpose."""

    sites: int = 3
    dtype: str = "fp32"
    heads: int = 3
    head_dim: int = 20
    causal: Causal = "none"
    fill: float = -np.inf
    padded: bool = True
    softcap: float = 0.0
    guard: bool = True
    static: bool = False
    batch: int | str = "b"
    positions: int = 0  # rows of a table of position embeddings added to x; 0: none
    seed: int = 0


class Builder:
    """A graph under construction: every ``op`` appends a node and returns its output."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.dtype, self.numpy_dtype = DTYPES[recipe.dtype]
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.count = 0

    def op(
        self, kind: str, *inputs: ir.Value | None, name: str = "", outputs: int = 1, **attributes: object
    ) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes, num_outputs=outputs)
        self.nodes.append(node)
        self.count += 1
        node.name = name or f"n{self.count}"
        for i, value in enumerate(node.outputs):
            value.name = node.name if i == 0 else f"{node.name}_{i}"
        return node.outputs[0]

    def constant(self, array: object, name: str = "", dtype: type = np.int64) -> ir.Value:
        self.count += 1
        name = name or f"c{self.count}"
        tensor = ir.tensor(np.array(array, dtype), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self.initializers[name] = value
        return value

    def number(self, array: object, name: str = "") -> ir.Value:
        return self.constant(array, name, self.numpy_dtype)


def save_pair(folder: Path, recipe: Recipe, fault: Fault | None = None, at: int = 1) -> tuple[Path, Path, list[Site]]:
    """Writes both models and returns their paths and the sites; ``fault`` sits in the ``at``-th fused site."""
    plain, flash = folder / "plain.onnx", folder / "flash.onnx"
    ir.save(build(recipe, fused=False), plain)
    ir.save(build(recipe, fused=True, fault=fault, at=at), flash)
    return plain, flash, [site_of(recipe, i) for i in range(recipe.sites)]


def site_of(recipe: Recipe, i: int) -> Site:
    keep = ("keep",) if recipe.padded else ()
    return Site(
        name=f"attn{i}",
        status="fused",
        operator="FlashAttentionEx",
        attributes=attributes(recipe),
        head_dim=recipe.head_dim,
        output=f"context{i}",
        boundary=(f"query{i}", f"key{i}", f"value{i}", *keep),
        query_source=f"query{i}",
        key_source=f"key{i}",
    )


def attributes(recipe: Recipe) -> Attributes:
    return Attributes(
        q_num_heads=recipe.heads,
        kv_num_heads=recipe.heads,
        scale=float(DTYPES[recipe.dtype][1](recipe.head_dim**-0.5)),
        softcap=recipe.softcap,
        causal=int(recipe.causal != "none"),
        diagonal=int(recipe.causal == "bottom_right"),
        has_bias=int(recipe.padded),
    )


def build(recipe: Recipe, *, fused: bool, fault: Fault | None = None, at: int = 1) -> ir.Model:
    b = Builder(recipe)
    wide = recipe.heads * recipe.head_dim
    lengths = (recipe.batch, 33, 47) if recipe.static else (recipe.batch, "s", "t")
    x, y = (
        ir.Value(name=n, type=ir.TensorType(b.dtype), shape=ir.Shape([lengths[0], length, wide]))
        for n, length in (("x", lengths[1]), ("y", lengths[2]))
    )
    keep = ir.Value(name="keep", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([lengths[0], lengths[2]]))
    rng = np.random.default_rng(recipe.seed)
    hidden = x
    if recipe.positions:
        length = b.op("Squeeze", b.op("Shape", x, start=1, end=2), b.constant([0]))
        rows = b.op("Range", b.constant(0), length, b.constant(1))
        table = b.number(rng.standard_normal((recipe.positions, wide)), "positions")
        hidden = b.op("Add", x, b.op("Gather", table, rows))
    for i in range(recipe.sites):
        weights = {n: b.number(rng.standard_normal((wide, wide)) / np.sqrt(wide), f"w_{n}{i}") for n in "qkvo"}
        query = b.op("MatMul", hidden, weights["q"], name=f"query{i}")
        key = b.op("MatMul", y, weights["k"], name=f"key{i}")
        value = b.op("MatMul", y, weights["v"], name=f"value{i}")
        here = fault if i == at else None
        attend = fuse if fused else leave
        context = attend(b, (query, key, value), keep, f"context{i}", here)
        hidden = b.op("Add", hidden, b.op("MatMul", context, weights["o"]))
    output = b.op("Tanh", hidden, name="output")
    output.type, output.shape = x.type, x.shape
    inputs = [x, y, keep] if recipe.padded else [x, y]
    opsets = {"": 18} | ({DOMAIN: 1} if fused else {})
    graph = ir.Graph(
        inputs, [output], nodes=b.nodes, initializers=list(b.initializers.values()), opset_imports=opsets, name="pair"
    )
    functions = functions_for(b.nodes, 18) if fused else []
    return ir.Model(graph, ir_version=9, functions=functions)


def padding_bias(b: Builder, keep: ir.Value) -> ir.Value:
    """``[b, 1, 1, t]``: 0 where ``keep``, the recipe's fill elsewhere."""
    mask = b.op("Cast", b.op("Unsqueeze", keep, b.constant([1, 2])), to=ir.DataType.BOOL)
    return b.op("Where", mask, b.number(0.0), b.number(b.recipe.fill))


def causal_bias(b: Builder, query: ir.Value, key: ir.Value) -> ir.Value:
    """``[s, t]``: 0 on and below the diagonal of the recipe's kind, -inf above."""
    s, t = (b.op("Squeeze", b.op("Shape", v, start=1, end=2), b.constant([0])) for v in (query, key))
    zero, one = b.constant(0), b.constant(1)
    rows = b.op("Unsqueeze", b.op("Range", zero, s, one), b.constant([1]))
    if b.recipe.causal == "bottom_right":
        rows = b.op("Add", rows, b.op("Sub", t, s))
    seen = b.op("LessOrEqual", b.op("Range", zero, t, one), rows)
    return b.op("Where", seen, b.number(0.0), b.number(-np.inf))


def heads_of(b: Builder, value: ir.Value) -> ir.Value:
    split = b.op("Reshape", value, b.constant([0, 0, b.recipe.heads, b.recipe.head_dim]))
    return b.op("Transpose", split, perm=[0, 2, 1, 3])


def leave(
    b: Builder, qkv: tuple[ir.Value, ir.Value, ir.Value], keep: ir.Value, name: str, fault: Fault | None
) -> ir.Value:
    """Attention in standard operators."""
    r = b.recipe
    query, key, value = (heads_of(b, v) for v in qkv)
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = b.op("Mul", scores, b.number(r.head_dim**-0.5))
    if r.softcap:
        scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, b.number(r.softcap))), b.number(r.softcap))
    if r.padded:
        scores = b.op("Add", scores, padding_bias(b, keep))
    if r.causal != "none":
        scores = b.op("Add", scores, causal_bias(b, qkv[0], qkv[1]))
    probs = b.op("Softmax", scores, axis=-1)
    if r.guard:
        probs = b.op("Where", b.op("IsNaN", probs), b.number(0.0), probs)
    context = b.op("Transpose", b.op("MatMul", probs, value), perm=[0, 2, 1, 3])
    return b.op("Reshape", context, b.constant([0, 0, r.heads * r.head_dim]), name=name)


def fuse(
    b: Builder, qkv: tuple[ir.Value, ir.Value, ir.Value], keep: ir.Value, name: str, fault: Fault | None
) -> ir.Value:
    """One FlashAttentionEx node, with ``fault`` in it."""
    r = b.recipe
    query, key, value = qkv
    changed = attributes(r).as_dict()
    lengths = [2**31 - 1]
    if fault == "scale":
        changed["scale"] *= 1.01
    if fault == "scale_half":
        changed["scale"] = changed["scale"] ** 0.5
    if fault == "softcap_dropped":
        changed["softcap"] = 0.0
    if fault == "causal_kind":
        changed["diagonal"] = 1 - changed["diagonal"]
    if fault == "mask_off_by_one":
        changed |= {"causal": 0, "window_right": 1}
    if fault == "mask_dropped":
        changed["has_bias"] = 0
    if fault == "one_tile_wrong":
        lengths, changed["has_kv_lengths"] = [64], 1
    if fault == "key_value_swapped":
        key, value = value, key
    if fault == "heads_permuted":
        split = b.op("Reshape", query, b.constant([0, 0, r.heads, r.head_dim]))
        turned = b.op("Gather", split, b.constant([*range(1, r.heads), 0]), axis=2)
        query = b.op("Reshape", turned, b.constant([0, 0, r.heads * r.head_dim]))
    bias = padding_bias(b, keep) if r.padded else b.number(np.zeros((1, 1, 1, 1)))
    node = ir.node(
        "FlashAttentionEx",
        [query, key, value, bias, b.constant(lengths, dtype=np.int32), b.constant([-np.inf], dtype=np.float32)],
        changed,
        domain=DOMAIN,
        num_outputs=2,
        name=f"flash_{name}",
    )
    b.nodes.append(node)
    node.outputs[0].name, node.outputs[1].name = name, f"{name}_lse"
    return node.outputs[0]
