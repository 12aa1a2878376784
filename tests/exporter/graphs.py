# SPDX-License-Identifier: Apache-2.0
"""Small attention graphs in onnx's text form, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from exporter.torch_exports import run

from flash_export import check
from flash_export.dims import Dim
from flash_export.find import find
from flash_export.rewrite import rewrite
from flash_export.shapes import Shapes
from flash_export.sites import Site

QKV = "float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v"
OUT = "float[B, 4, S, 8] out"
CONSTANTS = (
    "float scale = {0.5}, float zero = {0.0}, float hidden = {-inf}, float lowest = {-3.4028234663852886e+38}, "
    "int64[1] ax0 = {0}, int64[1] ax1 = {1}, int64[1] ax2 = {2}, int64[1] ax3 = {3}, int64 i0 = {0}, int64 i1 = {1}, "
    "int64 i2 = {2}, bool yes = {1}"
)
PRODUCT = "kt = Transpose <perm = [0, 1, 3, 2]> (k)\n scores = MatMul (q, kt)\n scaled = Mul (scores, scale)\n"
REST = "probs = Softmax <axis = -1> (masked)\n out = MatMul (probs, v)\n"
LENGTHS = (
    "q_shape = Shape (q)\n k_shape = Shape (k)\n rows = Gather <axis = 0> (q_shape, i2)\n"
    "columns = Gather <axis = 0> (k_shape, i2)\n row = Range (i0, rows, i1)\n column = Range (i0, columns, i1)\n"
    "i = Unsqueeze (row, ax1)\n j = Unsqueeze (column, ax0)\n"
)

SIZES = [{"B": 2, "S": 5, "T": 7}, {"B": 1, "S": 1, "T": 3}, {"B": 3, "S": 9, "T": 4}, {"B": 1, "S": 67, "T": 130}]
SQUARE = [{"B": 2, "S": 5, "T": 5}, {"B": 1, "S": 1, "T": 1}, {"B": 1, "S": 67, "T": 67}]


def model(
    body: str, *, inputs: str = QKV, outputs: str = OUT, constants: str = CONSTANTS, opset: int = 18
) -> onnx.ModelProto:
    """The parsed and checked model; onnx's text form knows no -inf, so -12345 is written for it."""
    text = (
        f'<ir_version: 9, opset_import: ["" : {opset}]>\nmain ({inputs}) => ({outputs})\n<{constants}>\n{{\n{body}}}\n'
    )
    proto = onnx.parser.parse_model(text.replace("-inf", "-12345.0"))
    for initializer in proto.graph.initializer:
        if initializer.data_type == onnx.TensorProto.FLOAT and onnx.numpy_helper.to_array(initializer) == -12345.0:
            initializer.CopyFrom(onnx.numpy_helper.from_array(np.array(-np.inf, np.float32), initializer.name))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def attention(mask: str, **extra: str | int) -> onnx.ModelProto:
    """Attention over ``scaled`` with the lines of ``mask`` making ``masked``."""
    return model(LENGTHS + PRODUCT + mask + "\n" + REST, **extra)  # type: ignore[arg-type]


def holding(proto: onnx.ModelProto, **arrays: np.ndarray) -> onnx.ModelProto:
    """The model with these inputs as constants of its own."""
    inputs = [value for value in proto.graph.input if value.name not in arrays]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


def fuse(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Site]]:
    """The model with every attention fused that can be, checked, and its sites."""
    converted = ir.from_proto(proto)
    sites = find(converted)
    rewrite(converted, sites)
    fused = ir.to_proto(converted)
    onnx.checker.check_model(fused, full_check=True, check_custom_domain=True)
    return fused, sites


def length_at(known: Shapes, dim: Dim, sizes: Mapping[str, int]) -> int:
    """What ``dim`` is at these sizes, its quotients by Python's own integer division."""
    dim = known._written_out(dim)
    quotients = {name: known._floors[name] for name in dim.symbols - set(sizes)}
    return dim.evaluate({**sizes, **{n: length_at(known, inner, sizes) // by for n, (inner, by) in quotients.items()}})


def only(sites: Sequence[Site]) -> Site:
    """The only site."""
    assert len(sites) == 1, [s.name for s in sites]
    return sites[0]


def causal(site: Site) -> str:
    """Which diagonal a fused site's attribute has."""
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    return site.attributes.causal_kind


def numbers(
    sizes: Mapping[str, int], seed: int = 0, *, heads: int = 4, depth: int = 8
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random fp32 Q, K and V for B, S and T of ``sizes``."""
    random = np.random.default_rng(seed)
    shapes = [(sizes["B"], heads, n, depth) for n in (sizes["S"], sizes["T"], sizes["T"])]
    q, k, v = (random.standard_normal(s).astype(np.float32) for s in shapes)
    return q, k, v


def padding(sizes: Mapping[str, int]) -> np.ndarray:
    """``pad`` [B, 1, 1, T], True where a key is hidden: half of the first entry's, and all of the last one's."""
    pad = np.zeros((sizes["B"], 1, 1, sizes["T"]), bool)
    pad[0, ..., : sizes["T"] // 2 + 1] = True
    pad[-1] = True
    return pad


def both(proto: onnx.ModelProto, fused: onnx.ModelProto, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The first output of the two models on the same inputs."""
    return run(proto.SerializeToString(), inputs)[0], run(fused.SerializeToString(), inputs)[0]


def code(proto: onnx.ModelProto) -> str:
    """The only site's refusal code, or its status."""
    site = only(find(ir.from_proto(proto)))
    return site.status if site.reason is None else site.reason.code


def renamed(proto: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The same graph, every tensor and node called n0, n1, … and the nodes in another valid order.

    For graphs without subgraphs; the checker would find a name that was overlooked.
    """
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = copy.graph
    values = [*graph.input, *graph.output]
    names = [v.name for v in (*values, *graph.initializer)] + [o for n in graph.node for o in n.output if o]
    mixed = np.random.default_rng(seed).permutation(list(dict.fromkeys(names)))
    new = {str(name): f"n{i}" for i, name in enumerate(mixed)} | {"": ""}
    for named in (*values, *graph.initializer):
        named.name = new[named.name]
    for index, node in enumerate(graph.node):
        node.name = f"n{index}"
        node.input[:] = [new[x] for x in node.input]
        node.output[:] = [new[x] for x in node.output]
    del graph.value_info[:]
    left, done, order = list(graph.node), {v.name for v in (*graph.input, *graph.initializer)}, []
    while left:
        ready = [n for n in left if all(x in done or not x for x in n.input)]
        pick = ready[-1] if seed % 2 else ready[0]
        left.remove(pick)
        order.append(pick)
        done.update(pick.output)
    del graph.node[:]
    graph.node.extend(order)
    onnx.checker.check_model(copy)
    return copy


PLAIN = PRODUCT + "probs = Softmax <axis = -1> (scaled)\n out = MatMul (probs, v)\n"
"""The body of attention without a mask."""

HEADS = "q0 = MatMul (x, wq)\n k0 = MatMul (x, wk)\n v0 = MatMul (x, wv)\n"
SPLIT_HEADS = "".join(f"{n}1 = Reshape ({n}0, split)\n {n} = Transpose <perm = [0, 2, 1, 3]> ({n}1)\n" for n in "qkv")
JOIN = "back = Transpose <perm = [0, 2, 1, 3]> (out4)\n out = Reshape (back, join)\n"
SHAPES = CONSTANTS + ", int64[4] split = {0, 0, 4, 8}, int64[3] join = {0, 0, 32}"
PROJECTED = "float[B, S, 32] x, float[32, 32] wq, float[32, 32] wk, float[32, 32] wv"


def sites_checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sites that the check runs from now on, each when it is run."""
    asked: list[str] = []
    check_site = check.check_site

    def counted(site: Site, *arguments: object, **options: object) -> list:
        asked.append(site.name)
        return check_site(site, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(check, "check_site", counted)
    return asked
