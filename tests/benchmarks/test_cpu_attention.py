# SPDX-License-Identifier: Apache-2.0
"""benchmarks/cpu_attention.py: every way computes the same attention, and the tables say what was measured."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cpu_attention  # noqa: E402
import cpu_graphs  # noqa: E402
import cpu_peaks  # noqa: E402
import cpu_runner  # noqa: E402
from contract.reference import attention  # noqa: E402
from cpu_chart import chart  # noqa: E402
from cpu_graphs import GRAPHS, Problem, takes  # noqa: E402

PROBLEMS = [
    Problem(heads=4, head_dim=16, seqlen_q=37, seqlen_kv=37),
    Problem(heads=4, head_dim=16, seqlen_q=37, seqlen_kv=37, causal=True),
    Problem(heads=4, head_dim=16, seqlen_q=37, seqlen_kv=37, kv_heads=2, causal=True),
    Problem(heads=4, head_dim=16, seqlen_q=37, seqlen_kv=37, mask="keys"),
    Problem(heads=4, head_dim=16, seqlen_q=37, seqlen_kv=37, mask="full"),
    Problem(heads=4, head_dim=16, seqlen_q=1, seqlen_kv=53),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("way", [*GRAPHS, cpu_attention.TORCH])
def test_every_way_computes_the_same(way: str, problem: Problem) -> None:
    if way in GRAPHS and not takes(way, problem):
        pytest.skip(f"{way} cannot express it")
    given = problem.arrays()
    wanted, _ = attention(
        given["query"], given["key"], given["value"],
        scale=problem.head_dim**-0.5, causal=int(problem.causal), diagonal=1, bias=given.get("mask"),
    )  # fmt: skip
    for bound in (False, True):
        fields = {f: getattr(problem, f) for f in Problem.__dataclass_fields__}
        result = cpu_runner.open_way(way, 1, problem=fields, bound=bound)()
        result = result[0] if way in GRAPHS else result
        output = result if isinstance(result, np.ndarray) else result.numpy()
        if output.ndim == 3:
            output = np.swapaxes(output.reshape(1, -1, problem.heads, problem.head_dim), 1, 2)
        np.testing.assert_allclose(output, wanted, atol=2e-5)


def test_a_causal_mask_halves_the_products_that_count() -> None:
    full, causal = (Problem(heads=1, head_dim=1, seqlen_q=4, seqlen_kv=4, causal=c) for c in (False, True))
    assert (full.products, causal.products) == (64.0, 40.0)


def test_a_measuring_process_times_a_run_and_weighs_it() -> None:
    runner = cpu_attention.Runner()
    problem = Problem(heads=4, head_dim=16, seqlen_q=512, seqlen_kv=512)
    request = {"threads": 1, "problem": {f: getattr(problem, f) for f in Problem.__dataclass_fields__}}
    assert 0 < runner.ask(way="operator", seconds=0.01, **request) < 1
    matrix = 4 * 512 * 512 * 4
    assert runner.ask(way="decomposed", seconds=0, **request) > matrix
    assert runner.ask(way="operator", seconds=0, **request) < matrix
    runner.close()


def test_tables_are_medians_of_ratios() -> None:
    bench = cpu_attention.Bench.__new__(cpu_attention.Bench)
    problems = [cpu_attention.decode(h, 64) for h in (8, 12)]
    bench.times = {
        (p, 1, way): t
        for p, ours, theirs in zip(problems, (1.0, 2.0), (3.0, 10.0), strict=True)
        for way, t in (("operator", ours), (cpu_attention.TORCH, theirs))
    }
    assert cpu_attention.ratio(bench, problems, 1, "operator", cpu_attention.TORCH) == 4.0
    assert cpu_attention.speed(bench, problems, "decomposed") is None


def test_the_page_has_the_markers_and_a_rewrite_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(cpu_attention.PAGE.read_text())
    cpu_attention.rewrite(page, "| a |")
    text = page.read_text()
    assert f"{cpu_attention.BEGIN}\n| a |\n{cpu_attention.END}" in text
    assert text.startswith("# Performance")


def test_a_chart_leaves_out_what_was_not_measured() -> None:
    drawn = chart("a < b", [512, 1024], {"all": [1.0, 2.0], "one": [None, 1.0], "none": [None, None]})
    assert drawn.count("<polyline") == 2
    assert drawn.count("<circle") == 3
    assert "a &lt; b" in drawn


def test_the_graphs_are_named_as_the_tables_name_them() -> None:
    assert set(cpu_attention.OURS) <= set(cpu_graphs.GRAPHS)


def test_the_peaks_are_those_of_a_processor() -> None:
    peaks = cpu_peaks.measure(cpu_peaks.best_target())
    assert 1e9 < peaks.products < 1e13
    assert 1e8 < peaks.memory < 1e13
    assert 1e8 < peaks.cache < 1e14


def test_a_lowered_process_runs_lower_kernels() -> None:
    """The seeded fault: a name that nobody knows must reach the library."""
    runner = cpu_attention.Runner({"FLASH_TRT_CPU_TARGET": "none"})
    problem = Problem(heads=1, head_dim=8, seqlen_q=1, seqlen_kv=1)
    with pytest.raises(SystemExit, match="ended"):
        runner.ask(way="operator", threads=1, problem=dataclasses.asdict(problem), seconds=0.01)


def test_what_was_not_measured_is_an_empty_cell() -> None:
    bench = cpu_attention.Bench.__new__(cpu_attention.Bench)
    bench.times, bench.plan = {}, cpu_attention.QUICK
    assert cpu_attention.torch_cells(bench, {64: [cpu_attention.decode(8, 64)], 128: []}) == [""] * 4
