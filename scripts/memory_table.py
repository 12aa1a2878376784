#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the scratch memory of attention in TensorRT for RTX, without and with our plugin, for the README's table.

Each row is one way that attention is written in ONNX, batch 1, 8 heads, head dim 64 unless it says otherwise. The
unfused graph and the FlashAttention node that stands for it are both built into an engine for one GPU generation; the
number is TensorRT's own "Max Scratch Memory", and who computes the unfused graph is read from the plan. A row that
flash-export refuses stays what it is, and says so. No GPU is needed. Lengths are static: with a dynamic length,
TensorRT for RTX 1.7.1 stops counting buffers of 8 GiB and more.

    python scripts/memory_table.py            # rewrites the table between the markers in README.md
    python scripts/memory_table.py --check    # only prints it
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from flash_export.find import find
from flash_export.op import DOMAIN, LAYOUT_BHSD, OPERATORS, VERSION, Attributes
from flash_trt import attention, backends, onnx_file, plugin_library
from flash_trt.build import build_engine, prove_plugins
from flash_trt.shapes import plan_profile

BATCH, HEADS, HEAD_DIM, LARGE_HEAD_DIM = 1, 8, 64, 320
SCALE = HEAD_DIM**-0.5
CAP = 30.0
SINKS = np.linspace(-1, 1, HEADS)
LENGTHS = (1024, 4096, 16384)
TARGET = "sm89"
OPSET = 18
BEGIN, END = "<!-- memory-table:begin -->", "<!-- memory-table:end -->"
MIB = 2**20

Graph = tuple[list[onnx.NodeProto], list[onnx.TensorProto]]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One way to write attention: its unfused graph, and the FlashAttention node with the same outputs.

    ``fused`` is None where there is no such node, since flash-export refuses the graph.
    """

    title: str
    dtype: int
    unfused: Graph
    fused: Graph | None
    lse: bool = False
    head_dim: int = HEAD_DIM


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Scratch bytes of a row, by length, and who computes its unfused graph.

    ``refusal``: why flash-export leaves that graph as it is, "" where it fuses it; ``stays``: there is no node either.
    """

    title: str
    unfused: dict[int, int]
    fused: dict[int, int]
    by: str
    refusal: str
    stays: bool

    @property
    def note(self) -> str:
        """What the table must say of the row below it; "" for nothing."""
        if not self.refusal:
            return ""
        done = "not fused" if self.stays else "not fused by flash-export, the node is written by hand"
        return f"{self.title}: {done} ({self.refusal})."


# --- the graphs: query, key, value [1, 8, S, D] -> output [1, 8, S, D] (and lse [1, 8, S]) ---------------------------


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


def flash(**attributes: float) -> Graph:
    """One FlashAttention node."""
    values = Attributes(q_num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE, layout=LAYOUT_BHSD, **attributes)
    node = helper.make_node(
        "FlashAttention", ["query", "key", "value"], ["output"], name="attention", domain=DOMAIN, **values.as_dict()
    )
    return [node], []


def flash_extended(dtype: int, sinks: np.ndarray | None = None) -> Graph:
    """One FlashAttentionEx node, whose side inputs are neutral but for ``sinks`` [8]."""
    operator = OPERATORS["FlashAttentionEx"]
    values = Attributes(
        q_num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE, layout=LAYOUT_BHSD, has_sinks=int(sinks is not None)
    )
    node = helper.make_node(
        operator.name, operator.inputs, operator.outputs, name="attention", domain=DOMAIN, **values.as_dict()
    )
    sides = [
        constant("bias", np.zeros((1, 1, 1, 1)), dtype),
        constant("kv_lengths", [np.iinfo(np.int32).max], TensorProto.INT32),
        constant("sinks", [-np.inf] if sinks is None else sinks, TensorProto.FLOAT),
    ]
    return [node], sides


def constant(name: str, value: object, dtype: int) -> onnx.TensorProto:
    """An initializer."""
    return numpy_helper.from_array(np.array(value, helper.tensor_dtype_to_np_dtype(dtype)), name)


HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT
ROWS = (
    Row("causal, fp16", HALF, causal(HALF), flash(causal=1)),
    Row("causal, fp32", FULL, causal(FULL), flash(causal=1)),
    Row("log-sum-exp as an output, fp16", HALF, with_lse(HALF), flash_extended(HALF), lse=True),
    Row("softcap, fp16", HALF, softcapped(HALF), flash(softcap=CAP)),
    Row("sinks, fp16", HALF, with_sinks(HALF), flash_extended(HALF, SINKS)),
    Row("QKᵀ and softmax in fp32, the rest in fp16", HALF, upcast_scores(HALF), flash()),
    Row(
        f"causal, head dim {LARGE_HEAD_DIM}, fp16",
        HALF,
        causal(HALF, LARGE_HEAD_DIM**-0.5),
        None,
        head_dim=LARGE_HEAD_DIM,
    ),
)


def model_of(row: Row, graph: Graph, length: int) -> onnx.ModelProto:
    """A model around ``graph`` with the row's inputs and outputs."""
    nodes, constants = graph
    dims = [BATCH, HEADS, length, row.head_dim]
    inputs = [helper.make_tensor_value_info(name, row.dtype, dims) for name in ("query", "key", "value")]
    outputs = [helper.make_tensor_value_info("output", row.dtype, dims)]
    outputs += [helper.make_tensor_value_info("lse", TensorProto.FLOAT, dims[:3])] if row.lse else []
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    built = helper.make_graph(nodes, "attention", inputs, outputs, constants)
    return helper.make_model(built, opset_imports=opsets, ir_version=9)  # noqa: TID251 - a few nodes, no rewriting


# --- measuring --------------------------------------------------------------------------------------------------------


def build(backend: backends.Backend, model: onnx.ModelProto) -> tuple[int, set[str]]:
    """The engine's Max Scratch Memory in bytes, and who computes its attention (``flash_trt.attention.By``)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention.onnx"
        onnx.save(model, path)
        file = onnx_file.read(path)
        engine = build_engine(backend, file, plan_profile(file.inputs, ()), (TARGET,))
        prove_plugins(backend, file, engine)
        by = {found.by for found in attention.describe(file, engine.data)}
    if engine.scratch_bytes is None:
        raise SystemExit(f"{backend.name} {backend.version} does not log its scratch memory")
    return engine.scratch_bytes, by


def refusal_of(row: Row) -> str:
    """Why flash-export leaves the row's unfused graph as it is: the reason's code and text; "" where it fuses it."""
    sites = find(ir.from_proto(model_of(row, row.unfused, LENGTHS[0])))
    reasons = [site.reason for site in sites if site.status == "refused" and site.reason]
    return "; ".join(f"`{reason.code}`: {reason.text}" for reason in reasons)


def measure(lengths: Sequence[int], rows: Sequence[Row] = ROWS) -> list[Measured]:
    """Builds every engine; progress goes to stderr."""
    backend = backends.load("tensorrt-rtx")
    plugin_library.load(backend)
    measured = []
    for row in rows:
        print(f"measuring: {row.title}", file=sys.stderr)
        unfused = {length: build(backend, model_of(row, row.unfused, length)) for length in lengths}
        fused = unfused if row.fused is None else {n: build(backend, model_of(row, row.fused, n)) for n in lengths}
        who = {by for _, found in unfused.values() for by in found}
        measured.append(
            Measured(
                row.title,
                {length: size for length, (size, _) in unfused.items()},
                {length: size for length, (size, _) in fused.items()},
                " or ".join(words for by, words in attention.WORDS.items() if by in who),
                refusal_of(row),
                row.fused is None,
            )
        )
    return measured


# --- the table --------------------------------------------------------------------------------------------------------


def table(measured: Sequence[Measured], lengths: Sequence[int], version: str) -> str:
    """The README's table in Markdown, in MiB."""
    lines = [
        "| attention | without the plugin | " + " | ".join(f"S = {length:,}" for length in lengths) + " |",
        "|---" * (len(lengths) + 2) + "|",
    ]
    for row in measured:
        sizes = [(spell(row.unfused[length]), spell(row.fused[length])) for length in lengths]
        cells = [f"{before}, stays" if row.stays else f"{before} → **{after}**" for before, after in sizes]
        lines.append(f"| {row.title} | {row.by} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"In MiB: TensorRT for RTX {version} on the unfused graph → the same with one FlashAttention node and the "
        f"plugin. Built for {TARGET}; inputs and outputs are not counted.",
        *(row.note for row in measured if row.note),
    ]
    return "\n".join(lines)


def spell(size_bytes: int) -> str:
    """MiB with at most one decimal; "under 0.1" for what would round to nothing."""
    if not size_bytes:
        return "0"
    return "under 0.1" if size_bytes < MIB / 10 else f"{size_bytes / MIB:,.1f}".removesuffix(".0")


def rewrite(readme: Path, text: str) -> None:
    """Puts ``text`` between the two markers of ``readme``."""
    content = readme.read_text(encoding="utf-8")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{readme} lacks the markers {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print the table and change nothing")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="S")
    arguments = parser.parse_args()
    measured = measure(arguments.lengths)
    text = table(measured, arguments.lengths, backends.load("tensorrt-rtx").version)
    print(text)
    if not arguments.check:
        rewrite(Path(__file__).resolve().parents[1] / "README.md", text)


if __name__ == "__main__":
    main()
