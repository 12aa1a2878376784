# SPDX-License-Identifier: Apache-2.0
"""What the CPU's benchmark measures: problems, ways, rounds, and the processes that take turns."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cpu_graphs import GRAPHS, Problem, takes

TORCH = "PyTorch SDPA"
OURS = ("operator", "operator [B, S, H·D]")
ONNX_PEERS = tuple(way for way in GRAPHS if way not in OURS)


class Runner:
    """A process of cpu_runner.py."""

    def __init__(self, variables: Mapping[str, str] = types.MappingProxyType({})) -> None:
        command = [sys.executable, str(Path(__file__).with_name("cpu_runner.py"))]
        environment = {**os.environ, "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "PASSIVE", **variables}
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
    two_thread_length: int  # the longest on two threads
    rounds: int
    seconds: float

    def rounds_of(self, problem: Problem) -> int:
        """Long runs vary less, and take long."""
        return self.rounds if problem.seqlen_q <= 2048 else max(3, self.rounds // 3)


LENGTHS = (512, 1024, 2048, 4096, 8192)
QUICK = Plan(lengths=LENGTHS, matrix_length=1024, two_thread_length=2048, rounds=7, seconds=0.05)
FULL = Plan(lengths=LENGTHS, matrix_length=2048, two_thread_length=8192, rounds=15, seconds=0.1)
LOWERED = {
    "FLASH_TRT_CPU_TARGET": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""Variables that lower the operator and PyTorch with its libraries to AVX2; ONNX Runtime has none for its own."""
SHAPES = ((8, 64), (12, 64), (8, 128), (12, 128))
"""(heads, head dim); at the longest lengths those of 8 heads alone."""
Times = dict[tuple[Problem, int, str], float]
"""(problem, threads, way) -> seconds of one run."""


class Bench:
    """Two processes that take turns, and what they measured."""

    def __init__(self, plan: Plan, variables: Mapping[str, str] = types.MappingProxyType({})) -> None:
        self.plan = plan
        self.times: Times = {}
        self._onnx, self._torch = Runner(variables), Runner(variables)

    def measure(self, problem: Problem, threads: int, ways: Iterable[str]) -> None:
        """Fills ``times`` for the ways that can express the problem."""
        able = [way for way in ways if way == TORCH or takes(way, problem)]
        print(f"measuring: {problem}, {threads} threads", file=sys.stderr)
        seen: dict[str, list[float]] = {way: [] for way in able}
        for _ in range(self.plan.rounds_of(problem)):
            for way in able:
                runner = self._torch if way == TORCH else self._onnx
                request = {"way": way, "threads": threads, "problem": dataclasses.asdict(problem)}
                seen[way].append(runner.ask(**request, seconds=self.plan.seconds))
        self.times |= {(problem, threads, way): statistics.median(times) for way, times in seen.items()}

    def model(self, way: str, path: Path, length: int, threads: int) -> float:
        """Seconds of a whole model."""
        request = {"way": way, "threads": threads, "model": str(path), "length": length}
        return self._onnx.ask(**request, seconds=5 * self.plan.seconds)

    def close(self) -> None:
        """Ends both processes."""
        self._onnx.close()
        self._torch.close()


def square(heads: int, head_dim: int, length: int, **more: Any) -> Problem:
    return Problem(heads=heads, head_dim=head_dim, seqlen_q=length, seqlen_kv=length, **more)


def squares(length: int, *, causal: bool, head_dim: int = 0) -> list[Problem]:
    """The problems of one length, of every head dim or of one."""
    shapes = [(h, d) for h, d in SHAPES if head_dim in (0, d) and (h == 8 or length <= 4096)]
    return [square(h, d, length, causal=causal) for h, d in shapes]


def decode(heads: int, head_dim: int, kv_heads: int = 0) -> Problem:
    return Problem(heads=heads, head_dim=head_dim, seqlen_q=1, seqlen_kv=2048, kv_heads=kv_heads)


def measure_all(bench: Bench) -> None:
    """Everything that the tables show but AVX2, memory and models."""
    two_way = (OURS[0], TORCH)
    for causal in (False, True):
        for length in bench.plan.lengths:
            ways = [*GRAPHS, TORCH]
            if length > bench.plan.matrix_length:
                ways = [*OURS, "GroupQueryAttention", TORCH] if length <= 2048 else [*two_way]
            for problem in squares(length, causal=causal):
                bench.measure(problem, 1, ways)
                if length <= bench.plan.two_thread_length:
                    bench.measure(problem, 2, two_way)
    for heads, head_dim in SHAPES:
        for threads in (1, 2):
            for kv_heads in (0, heads // 4, 1):
                bench.measure(decode(heads, head_dim, kv_heads), threads, [OURS[0], *ONNX_PEERS, TORCH])
        for variant in VARIANTS.values():
            bench.measure(variant_problem(heads, head_dim, variant), 1, [OURS[0], *ONNX_PEERS, TORCH])


def measure_lowered(plan: Plan) -> Bench:
    """The comparison with PyTorch, both on AVX2."""
    lengths = tuple(n for n in plan.lengths if n <= 2048)
    bench = Bench(dataclasses.replace(plan, lengths=lengths), LOWERED)
    for heads, head_dim in SHAPES:
        for threads in (1, 2):
            for length in lengths:
                for causal in (False, True):
                    bench.measure(square(heads, head_dim, length, causal=causal), threads, (OURS[0], TORCH))
            for kv_heads in (0, heads // 4):
                bench.measure(decode(heads, head_dim, kv_heads), threads, (OURS[0], TORCH))
    bench.close()
    return bench


VARIANTS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "additive mask [B, 1, 1, Skv]": {"mask": "keys"},
    "additive mask [B, 1, Sq, Skv]": {"mask": "full"},
    "4 query heads a key head": {"group": 4},
}


def variant_problem(heads: int, head_dim: int, variant: dict[str, Any]) -> Problem:
    more = {"kv_heads": heads // variant["group"]} if "group" in variant else variant
    return square(heads, head_dim, 1024, **more)
