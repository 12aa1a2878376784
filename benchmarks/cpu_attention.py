#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention on this CPU: our operator in ONNX Runtime beside everything else that computes it.

Every round runs each way for a moment, one after the other, and what is printed are medians over the rounds; ONNX
Runtime and PyTorch have a process each, and the idle one sleeps. Memory is the peak that one run adds in a fresh
process.

    python benchmarks/cpu_attention.py                # rewrites the tables in docs/performance.md, in a few minutes
    python benchmarks/cpu_attention.py --check        # only prints them
    python benchmarks/cpu_attention.py --full         # more lengths and rounds, half an hour
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cpu_chart import chart
from cpu_graphs import GRAPHS, Problem, takes
from cpu_runner import PEAKS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "cpu_attention.svg"
BEGIN, END = "<!-- cpu-table:begin -->", "<!-- cpu-table:end -->"
TORCH = "PyTorch SDPA"
OURS = ("operator", "operator [B, S, H·D]")
ONNX_PEERS = tuple(way for way in GRAPHS if way not in OURS)
MIB = 2**20
MODELS = ("demo", "text_generation")
"""Samples whose models are timed whole, where they have been run."""
LENGTHS_OF_MODELS = (128, 512)  # the encoder ends there


class Runner:
    """A process of cpu_runner.py."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("cpu_runner.py"))]
        environment = {**os.environ, "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **request: Any) -> float:
        """Its answer: seconds, or bytes."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(request), file=stdin, flush=True)
        answer = stdout.readline()
        if not answer:
            raise SystemExit(f"the measuring process ended at {request}")
        return float(json.loads(answer))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    lengths: tuple[int, ...]
    matrix_length: int  # beyond it, ways that hold an S x S matrix take too long
    rounds: int
    seconds: float


QUICK = Plan(lengths=(512, 1024, 2048), matrix_length=1024, rounds=5, seconds=0.05)
FULL = Plan(lengths=(512, 1024, 2048, 4096, 8192), matrix_length=2048, rounds=7, seconds=0.2)
SHAPES = ((8, 64), (12, 64), (8, 128), (12, 128))
Times = dict[tuple[Problem, int, str], float]
"""(problem, threads, way) -> seconds of one run."""


class Bench:
    """Two processes that take turns, and what they measured."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.times: Times = {}
        self._onnx, self._torch = Runner(), Runner()

    def measure(self, problem: Problem, threads: int, ways: Iterable[str]) -> None:
        """Fills ``times`` for the ways that can express the problem."""
        able = [way for way in ways if way == TORCH or takes(way, problem)]
        print(f"measuring: {problem}, {threads} threads", file=sys.stderr)
        seen: dict[str, list[float]] = {way: [] for way in able}
        for _ in range(self.plan.rounds):
            for way in able:
                runner = self._torch if way == TORCH else self._onnx
                request = {"way": way, "threads": threads, "problem": dataclasses.asdict(problem)}
                seen[way].append(runner.ask(**request, seconds=self.plan.seconds))
        self.times |= {(problem, threads, way): statistics.median(times) for way, times in seen.items()}

    def model(self, way: str, path: Path, length: int, threads: int) -> float:
        """Seconds of a whole model."""
        request = {"way": way, "threads": threads, "model": str(path), "length": length}
        return self._onnx.ask(**request, seconds=5 * self.plan.seconds)

    def peak(self, way: str) -> float:
        """Operations or bytes a second of one thread, at the most."""
        seconds = min(self._torch.ask(way=way, threads=1, seconds=0.5) for _ in range(self.plan.rounds))
        return PEAKS[way] / seconds

    def close(self) -> None:
        """Ends both processes."""
        self._onnx.close()
        self._torch.close()


def square(heads: int, head_dim: int, length: int, **more: Any) -> Problem:
    return Problem(heads=heads, head_dim=head_dim, seqlen_q=length, seqlen_kv=length, **more)


def decode(heads: int, head_dim: int, kv_heads: int = 0) -> Problem:
    return Problem(heads=heads, head_dim=head_dim, seqlen_q=1, seqlen_kv=2048, kv_heads=kv_heads)


def measure_all(bench: Bench) -> None:
    """Everything that the tables show but memory and models."""
    two_way = (OURS[0], TORCH)
    for causal in (False, True):
        for length in bench.plan.lengths:
            for heads, head_dim in SHAPES:
                lean = [*OURS, "GroupQueryAttention", TORCH]
                everything = lean if length > bench.plan.matrix_length else [*GRAPHS, TORCH]
                bench.measure(square(heads, head_dim, length, causal=causal), 1, everything)
                bench.measure(square(heads, head_dim, length, causal=causal), 2, two_way)
    for heads, head_dim in SHAPES:
        for threads in (1, 2):
            for kv_heads in (0, heads // 4, 1):
                bench.measure(decode(heads, head_dim, kv_heads), threads, [OURS[0], *ONNX_PEERS, TORCH])
        for variant in VARIANTS.values():
            bench.measure(variant_problem(heads, head_dim, variant), 1, [OURS[0], *ONNX_PEERS, TORCH])


VARIANTS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "additive mask [B, 1, 1, Skv]": {"mask": "keys"},
    "additive mask [B, 1, Sq, Skv]": {"mask": "full"},
    "4 query heads a key head": {"group": 4},
}


def variant_problem(heads: int, head_dim: int, variant: dict[str, Any]) -> Problem:
    more = {"kv_heads": heads // variant["group"]} if "group" in variant else variant
    return square(heads, head_dim, 1024, **more)


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
                found = speed(bench, [square(h, d, length, causal=causal) for h, d in SHAPES], way)
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
            cases[f"{title}, S = {length:,}"] = [square(h, d, length, causal=causal) for h, d in SHAPES]
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
        rows.append([title, *(cells.get(way, "") for way in ONNX_PEERS)])
    return markdown(["× ONNX Runtime, 1 thread", *ONNX_PEERS], rows)


def torch_table(bench: Bench) -> str:
    """How many times faster than PyTorch."""
    rows = []
    for title, causal in (("full", False), ("causal", True)):
        for length in bench.plan.lengths:
            shapes = {d: [square(h, d, length, causal=causal) for h in (8, 12)] for d in (64, 128)}
            rows.append([f"{title}, S = {length:,}", *torch_cells(bench, shapes)])
    for title, group in (("", 0), (", 4 query heads a key head", 4)):
        shapes = {d: [decode(h, d, h // group if group else 0) for h in (8, 12)] for d in (64, 128)}
        rows.append([f"decoding, Skv = 2,048{title}", *torch_cells(bench, shapes)])
    return markdown(["× PyTorch SDPA", "D 64, 1 thread", "2 threads", "D 128, 1 thread", "2 threads"], rows)


def torch_cells(bench: Bench, problems: dict[int, list[Problem]]) -> list[str]:
    return [f"{ratio(bench, problems[d], n, OURS[0], TORCH):.2f}" for d in (64, 128) for n in (1, 2)]


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
    parts = [
        machine(),
        "Useful GFLOP/s on one thread, medians over 8 and 12 heads of 64 and 128:",
        speed_table(bench),
        f"A product of large matrices in PyTorch, the most that this processor does: {bench.peak('product') / 1e9:.0f} "
        f"GFLOP/s on one thread; one thread reads memory at {bench.peak('read') / 1e9:.0f} GB/s.",
        "How many times faster than PyTorch, medians over 8 and 12 heads:",
        torch_table(bench),
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
        series = {
            way: [speed(bench, [square(h, d, n, causal=True) for h, d in SHAPES], way) for n in plan.lengths]
            for way in [*GRAPHS, TORCH]
        }
        CHART.write_text(chart("causal attention, GFLOP/s on one thread, by length", plan.lengths, series))


if __name__ == "__main__":
    main()
