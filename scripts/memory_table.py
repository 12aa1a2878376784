#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the scratch memory of attention in TensorRT for RTX, without and with our plugin, for the README's table.

Each row is one way that attention is written in ONNX, batch 1, 8 heads, head dim 64 unless it says otherwise. The
unfused graph and the FlashAttention node that stands for it are both built into an engine for one GPU generation; the
number is TensorRT's own "Max Scratch Memory", and who computes the unfused graph is read from the plan, both as
``flash-trt build`` writes them into the sidecar. A row that flash-export refuses stays what it is, and says so. No GPU
is needed. Lengths are static: with a dynamic length, TensorRT for RTX 1.7.1 stops counting buffers of 8 GiB and more.

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

import attention_graphs as graphs
import onnx
import onnx_ir as ir
from attention_graphs import BATCH, HEAD_DIM, HEADS, OPSET, Graph
from onnx import TensorProto, helper

from flash_export.find import find
from flash_export.op import DOMAIN, VERSION
from flash_export.talk import Talk
from flash_trt import attention, backends
from flash_trt.build import BuildOptions
from flash_trt.build import build as build_step

LENGTHS = (1024, 4096, 16384)
TARGET = "sm89"
BEGIN, END = "<!-- memory-table:begin -->", "<!-- memory-table:end -->"
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One way to write attention: its unfused graph, and the FlashAttention node with the same outputs.

    ``fused`` is None where there is no such node, since flash-export refuses the graph. ``masked`` graphs have one more
    input, ``mask`` bool [1, 8, S, S], true where a query sees a key.
    """

    title: str
    dtype: int
    unfused: Graph
    fused: Graph | None
    lse: bool = False
    head_dim: int = HEAD_DIM
    masked: bool = False
    opset: int = OPSET


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


HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT
ROWS = (
    Row("causal, fp16", HALF, graphs.causal(HALF), graphs.flash(causal=1)),
    Row("causal, fp32", FULL, graphs.causal(FULL), graphs.flash(causal=1)),
    Row("log-sum-exp as an output, fp16", HALF, graphs.with_lse(HALF), graphs.flash_extended(HALF), lse=True),
    Row("softcap, fp16", HALF, graphs.softcapped(HALF), graphs.flash(softcap=graphs.CAP)),
    Row("sinks, fp16", HALF, graphs.with_sinks(HALF), graphs.flash_extended(HALF, graphs.SINKS)),
    Row("QKᵀ and softmax in fp32, the rest in fp16", HALF, graphs.upcast_scores(HALF), graphs.flash()),
    Row("causal SDPA of PyTorch's legacy exporter, fp16", HALF, graphs.legacy_sdpa(), graphs.flash(causal=1)),
    Row(
        "`Attention` with a boolean mask for each head, fp16",
        HALF,
        graphs.standard_masked(),
        graphs.flash_extended(HALF, masked=True),
        masked=True,
        opset=23,
    ),
    Row(
        f"causal, head dim {graphs.LARGE_HEAD_DIM}, fp16",
        HALF,
        graphs.causal(HALF, graphs.LARGE_HEAD_DIM**-0.5),
        None,
        head_dim=graphs.LARGE_HEAD_DIM,
    ),
)


def model_of(row: Row, graph: Graph, length: int) -> onnx.ModelProto:
    """A model around ``graph`` with the row's inputs and outputs."""
    nodes, constants = graph
    dims = [BATCH, HEADS, length, row.head_dim]
    inputs = [helper.make_tensor_value_info(name, row.dtype, dims) for name in ("query", "key", "value")]
    if row.masked:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, [BATCH, HEADS, length, length]))
    outputs = [helper.make_tensor_value_info("output", row.dtype, dims)]
    outputs += [helper.make_tensor_value_info("lse", TensorProto.FLOAT, dims[:3])] if row.lse else []
    opsets = [helper.make_opsetid("", row.opset), helper.make_opsetid(DOMAIN, VERSION)]
    built = helper.make_graph(nodes, "attention", inputs, outputs, constants)
    return helper.make_model(built, opset_imports=opsets, ir_version=9)  # noqa: TID251 - a few nodes, no rewriting


# --- measuring --------------------------------------------------------------------------------------------------------


def build(model: onnx.ModelProto) -> tuple[int, set[str]]:
    """What ``flash-trt build`` writes into the sidecar: scratch memory in bytes, and by whom the attention is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention.onnx"
        onnx.save(model, path)
        options = BuildOptions(path, path.with_suffix(".engine"), "tensorrt-rtx", (), (TARGET,), allow_none=True)
        sidecar = build_step(options, Talk(quiet=True))
    if sidecar["scratch_bytes"] is None:
        raise SystemExit(f"{sidecar['backend']['version']} of TensorRT for RTX does not log its scratch memory")
    return sidecar["scratch_bytes"], {found["by"] for found in sidecar["attention"]}


def refusal_of(row: Row) -> str:
    """Why flash-export leaves the row's unfused graph as it is: the reason's code and text; "" where it fuses it."""
    sites = find(ir.from_proto(model_of(row, row.unfused, LENGTHS[0])))
    reasons = [site.reason for site in sites if site.status == "refused" and site.reason]
    return "; ".join(f"`{reason.code}`: {reason.text}" for reason in reasons)


def measure(lengths: Sequence[int], rows: Sequence[Row] = ROWS) -> list[Measured]:
    """Builds every engine; progress goes to stderr."""
    measured = []
    for row in rows:
        print(f"measuring: {row.title}", file=sys.stderr)
        unfused = {length: build(model_of(row, row.unfused, length)) for length in lengths}
        fused = unfused if row.fused is None else {n: build(model_of(row, row.fused, n)) for n in lengths}
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


def varlen_note(backend: backends.Backend) -> str:
    """What TensorRT says of its own attention on packed sequences, each of its own length; "" where it builds it."""
    trt, mark = backend.trt, len(backend.log)
    builder = backends.create_builder(backend)
    network = backends.create_network(backend, builder)
    tensors = [network.add_input(name, trt.float16, (LENGTHS[0], HEADS, HEAD_DIM)) for name in ("q", "k", "v")]
    lengths = network.add_input("lengths", trt.int32, (3,))
    layer = network.add_attention_v2(*tensors, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE)
    layer.query_form = layer.key_value_form = trt.AttentionIOForm.PACKED_NHD
    layer.query_lengths = layer.key_value_lengths = lengths
    network.mark_output(layer.get_output(0))
    config = builder.create_builder_config()
    backends.set_targets(backend, config, (TARGET,))
    if builder.build_serialized_network(network, config) is not None:
        return ""
    words = "no fused kernel is available"
    why = f": {words}" if any(words in text for text in backend.errors_since(mark)) else ""
    return f"TensorRT's own attention on packed sequences (`IAttention`, `PACKED_NHD`) does not build{why}."


# --- the table --------------------------------------------------------------------------------------------------------


def table(measured: Sequence[Measured], lengths: Sequence[int], version: str, note: str = "") -> str:
    """The README's table in Markdown, in MiB; ``note`` is its last line."""
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
        *([note] if note else []),
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
    backend = backends.load("tensorrt-rtx")
    text = table(measured, arguments.lengths, backend.version, varlen_note(backend))
    print(text)
    if not arguments.check:
        rewrite(Path(__file__).resolve().parents[1] / "README.md", text)


if __name__ == "__main__":
    main()
