#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention on this CPU: our operator in ONNX Runtime beside everything else that computes it.

Every round runs each way for a moment, one after the other, and what is printed are medians over the rounds; ONNX
Runtime and PyTorch have a process each, and the idle one sleeps. Memory is the peak that one run adds in a fresh
process.

    python benchmarks/cpu_attention.py            # rewrites tables and plot of docs/performance.md, in ten minutes
    python benchmarks/cpu_attention.py --check    # only prints them
    python benchmarks/cpu_attention.py --full     # more rounds, ways with an S x S matrix at 2,048 too; half an hour
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cpu_bench import (
    FULL,
    ONNX_PEERS,
    OURS,
    QUICK,
    SHAPES,
    TORCH,
    VARIANTS,
    Bench,
    Runner,
    decode,
    measure_all,
    measure_lowered,
    square,
    squares,
    variant_problem,
)
from cpu_chart import chart
from cpu_graphs import GRAPHS, Problem, takes
from cpu_peaks import Peaks, best_target, measure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "cpu_attention.svg"
BEGIN, END = "<!-- cpu-table:begin -->", "<!-- cpu-table:end -->"
MIB = 2**20
MODELS = ("demo", "text_generation")
"""Samples whose models are timed whole, where they have been run."""
LENGTHS_OF_MODELS = (128, 512)  # the encoder ends there


# --- tables -----------------------------------------------------------------------------------------------------------


def speed(bench: Bench, problems: Sequence[Problem], way: str) -> float | None:
    """Median over the problems of useful GFLOP/s on one thread; None where one was not measured."""
    seen = [bench.times.get((problem, 1, way)) for problem in problems]
    if any(seconds is None for seconds in seen):
        return None
    return statistics.median(p.products / s / 1e9 for p, s in zip(problems, seen, strict=True) if s is not None)


def ratio(bench: Bench, problems: Sequence[Problem], threads: int, of: str, to: str) -> float:
    """Median over the problems of how many times faster ``of`` is than ``to``."""
    return statistics.median(bench.times[p, threads, to] / bench.times[p, threads, of] for p in problems)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_table(bench: Bench) -> str:
    """GFLOP/s by way, mask and length."""
    lengths = bench.plan.lengths
    rows = []
    for way in [*GRAPHS, TORCH]:
        cells = []
        for causal in (False, True):
            for length in lengths:
                found = speed(bench, squares(length, causal=causal), way)
                cells.append("" if found is None else f"{found:.0f}")
        if any(cells):
            rows.append([f"**{way}**" if way in OURS else way, *cells])
    head = ["", *(f"full, S = {n:,}" for n in lengths), *(f"causal, S = {n:,}" for n in lengths)]
    return markdown(head, rows)


def onnx_table(bench: Bench) -> str:
    """How many times faster than each way of ONNX Runtime, on one thread."""
    cases: dict[str, list[Problem]] = {}
    for title, causal in (("full", False), ("causal", True)):
        for length in bench.plan.lengths:
            cases[f"{title}, S = {length:,}"] = squares(length, causal=causal)
    for title, variant in VARIANTS.items():
        if variant:
            cases[f"{title}, S = 1,024"] = [variant_problem(h, d, variant) for h, d in SHAPES]
    cases["decoding, Skv = 2,048"] = [decode(h, d) for h, d in SHAPES]
    cases["decoding, 4 query heads a key head"] = [decode(h, d, h // 4) for h, d in SHAPES]
    cases["decoding, one key head"] = [decode(h, d, 1) for h, d in SHAPES]
    rows = []
    for title, problems in cases.items():
        seen = [way for way in ONNX_PEERS if all((p, 1, way) in bench.times for p in problems)]
        cells = {way: f"{ratio(bench, problems, 1, OURS[0], way):.2f}" for way in seen}
        if cells:
            rows.append([title, *(cells.get(way, "") for way in ONNX_PEERS)])
    return markdown(["× ONNX Runtime, 1 thread", *ONNX_PEERS], rows)


def torch_table(bench: Bench) -> str:
    """How many times faster than PyTorch."""
    rows = []
    for title, causal in (("full", False), ("causal", True)):
        for length in bench.plan.lengths:
            shapes = {d: squares(length, causal=causal, head_dim=d) for d in (64, 128)}
            rows.append([f"{title}, S = {length:,}", *torch_cells(bench, shapes)])
    for title, group in (("", 0), (", 4 query heads a key head", 4)):
        shapes = {d: [decode(h, d, h // group if group else 0) for h in (8, 12)] for d in (64, 128)}
        rows.append([f"decoding, Skv = 2,048{title}", *torch_cells(bench, shapes)])
    return markdown(["× PyTorch SDPA", "D 64, 1 thread", "2 threads", "D 128, 1 thread", "2 threads"], rows)


def torch_cells(bench: Bench, problems: dict[int, list[Problem]]) -> list[str]:
    """D 64 and 128, one and two threads; empty where it was not measured."""
    cells = []
    for head_dim in (64, 128):
        for threads in (1, 2):
            there = [(p, threads, TORCH) in bench.times for p in problems[head_dim]]
            known = bool(there) and all(there)
            cells.append(f"{ratio(bench, problems[head_dim], threads, OURS[0], TORCH):.2f}" if known else "")
    return cells


def bound_table(bench: Bench, peaks: Peaks) -> str:
    """How near the operator is to what one thread can do at the most."""
    rows = []
    for title, causal in (("full", False), ("causal", True)):
        for head_dim in (64, 128):
            lengths = bench.plan.lengths
            found = [speed(bench, squares(n, causal=causal, head_dim=head_dim), OURS[0]) for n in lengths]
            cells = ["" if x is None else f"{100e9 * x / peaks.products:.0f} %" for x in found]
            rows.append([f"{title}, D {head_dim}", *cells])
    return markdown(["of the peak of products", *(f"S = {n:,}" for n in bench.plan.lengths)], rows)


def decode_sentence(bench: Bench) -> str:
    """Bytes of keys and values a second."""
    seen = {
        way: [p.kv_bytes / bench.times[p, 1, way] / 1e9 for p in (decode(8, 64), decode(8, 128))]
        for way in (OURS[0], TORCH)
    }
    both = [
        "{} {:.0f} and {:.0f} GB/s".format(name, *seen[way])
        for name, way in (("the operator", OURS[0]), (TORCH, TORCH))
    ]
    return f"Decoding 8 heads of 64 and of 128 on one thread reads keys and values at: {'; '.join(both)}."


def variant_table(bench: Bench) -> str:
    """What masks and groups cost."""
    plain = [variant_problem(h, d, {}) for h, d in SHAPES]
    rows = []
    for title, variant in VARIANTS.items():
        problems = [variant_problem(h, d, variant) for h, d in SHAPES]
        times = [bench.times[p, 1, OURS[0]] / bench.times[q, 1, OURS[0]] for p, q in zip(problems, plain, strict=True)]
        rows.append([title, f"{statistics.median(times):.2f}"])
    return markdown(["S = 1,024", "time, × no mask"], rows)


def memory_table() -> str:
    """The peak that a run adds, its output not counted, in MiB; 8,192 only for ways without an S x S matrix."""
    kinds: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}}
    kinds |= {"mask [B, 1, 1, Skv]": {"mask": "keys"}, "mask [B, 1, Sq, Skv]": {"mask": "full"}}
    columns = [(f"{kind}, {n:,}", n, more) for n in (4096, 8192) for kind, more in kinds.items()]
    rows = []
    for way in [*GRAPHS, TORCH]:
        lean = way in (*OURS, TORCH, "GroupQueryAttention")
        cells = []
        for _, length, more in columns:
            problem = square(12, 64, length, **more)
            able = (way not in GRAPHS or takes(way, problem)) and (lean or length <= 4096)
            cells.append(f"{memory(way, problem) / MIB:,.0f}" if able else "")
        rows.append([f"**{way}**" if way in OURS else way, *cells])
    return markdown(["MiB, 12 heads of 64", *(title for title, _, _ in columns)], rows)


def memory(way: str, problem: Problem) -> float:
    print(f"measuring memory: {way}, {problem}", file=sys.stderr)
    runner = Runner()
    try:
        return max(0.0, runner.ask(way=way, threads=2, problem=dataclasses.asdict(problem), seconds=0))
    finally:
        runner.close()


def model_table(bench: Bench, models: Sequence[Path]) -> str:
    """Whole models: how many times faster the fused file runs with the operator than the unfused one without."""
    rows = []
    for fused in models:
        unfused = fused.with_suffix(".unfused.onnx")
        for length in LENGTHS_OF_MODELS:
            for threads in (1, 2):
                pairs = [
                    (bench.model("fused", fused, length, threads), bench.model("unfused", unfused, length, threads))
                    for _ in range(bench.plan.rounds)
                ]
                ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
                cells = [f"{theirs * 1e3:.1f}", f"{ours * 1e3:.1f}", f"{theirs / ours:.2f}"]
                rows.append([fused.parent.name, f"{length}", f"{threads}", *cells])
    return markdown(["model", "S", "threads", "unfused, ms", "fused, ms", "×"], rows)


def machine() -> str:
    """One line that says what was measured on."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = [f for f in ("avx2", "fma", "avx512f") if re.search(rf"\b{f}\b", Path("/proc/cpuinfo").read_text())]
    packages = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "torch"))
    name = cpu[1].strip() if cpu else platform.machine()
    return f"{name}, {os.cpu_count()} processors ({', '.join(flags)}); {packages}; fp32, batch 1."


def rewrite(page: Path, text: str) -> None:
    """Puts ``text`` between the two markers of ``page``."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} lacks the markers {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print the tables and change nothing")
    parser.add_argument("--full", action="store_true", help="more lengths and rounds")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], metavar="S", help="other lengths")
    parser.add_argument("--models", type=Path, nargs="*", default=[ROOT / "build" / n / "model.onnx" for n in MODELS])
    arguments = parser.parse_args()
    plan = FULL if arguments.full else QUICK
    if arguments.lengths:
        plan = dataclasses.replace(plan, lengths=tuple(arguments.lengths))
    bench = Bench(plan)
    measure_all(bench)
    present = [path for path in arguments.models if path.is_file()]
    target = best_target()
    peaks = measure(target)
    parts = [
        machine(),
        "Useful GFLOP/s on one thread, medians over 8 and 12 heads of 64 and 128 (at 8,192 over 8 heads):",
        speed_table(bench),
        f"One thread does {peaks.products / 1e9:.0f} GFLOP/s at the most in fused products from registers, and reads "
        f"{peaks.cache / 1e9:.0f} GB/s from a cache of 8 MiB and {peaks.memory / 1e9:.0f} GB/s from memory "
        f"(`python benchmarks/cpu_peaks.py`). The operator's share of the former:",
        bound_table(bench, peaks),
        decode_sentence(bench),
        "How many times faster than PyTorch, medians over 8 and 12 heads:",
        torch_table(bench),
    ]
    if target == "avx512":
        parts += [
            "The same where both are lowered to AVX2 (ONNX Runtime's own ways cannot be lowered, and are left out):",
            torch_table(measure_lowered(plan)),
        ]
    parts += [
        "How many times faster than ONNX Runtime's own ways, medians over 8 and 12 heads of 64 and 128:",
        onnx_table(bench),
        "What masks and groups cost:",
        variant_table(bench),
        "Memory that one run adds, its output not counted:",
        memory_table(),
    ]
    if present:
        parts += ["Whole models, batch 1:", model_table(bench, present)]
    bench.close()
    text = "\n\n".join(parts)
    print(text)
    if not arguments.check:
        rewrite(PAGE, text)
        series = {way: [speed(bench, squares(n, causal=True), way) for n in plan.lengths] for way in [*GRAPHS, TORCH]}
        CHART.write_text(chart("causal attention, GFLOP/s on one thread, by length", plan.lengths, series))


if __name__ == "__main__":
    main()
