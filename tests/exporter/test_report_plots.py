# SPDX-License-Identifier: Apache-2.0
"""Plots show every number they are given, at the right place."""

from __future__ import annotations

import re

import pytest

from flash_export.report_plots import bytes_text, error_histogram, memory_plot, seconds_bars, shares

MEMORY = {"lengths": [128, 256, 512], "unfused_bytes": [2**20, 2**22, 2**24], "fused_bytes": [2**16, 2**17, 2**18]}


def run(kind: str, error: float | None, tolerance: float | None) -> dict[str, object]:
    return {"kind": kind, "max_abs_error": error, "tolerance": tolerance}


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1, "1 B"), (1023, "1.02e+03 B"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (2**80, "1.07e+09 PiB")],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_a_quadratic_line_is_twice_as_steep_as_a_linear_one() -> None:
    svg = memory_plot(MEMORY)
    unfused, fused = (
        [tuple(map(float, point.split(","))) for point in line.split()] for line in re.findall(r'points="([^"]+)"', svg)
    )
    assert [x for x, _ in unfused] == [x for x, _ in fused]
    assert (unfused[0][1] - unfused[2][1]) == pytest.approx(2 * (fused[0][1] - fused[2][1]), abs=0.5)
    assert all(u[1] < f[1] for u, f in zip(unfused, fused, strict=True))
    assert "16 MiB" in svg
    assert "256 KiB" in svg


def test_runs_without_a_number_are_in_no_histogram() -> None:
    runs = [run("site", None, 1.0), run("site", 0.1, 0.0), run("model", 0.1, None), run("model", 0.25, 1.0)]
    assert shares(runs) == {"site": [], "model": [0.25]}


def test_every_run_is_in_one_bin_and_the_full_tolerance_in_the_last() -> None:
    runs = [run("site", 0.0, 1.0), run("site", 0.35, 1.0), run("site", 1.0, 1.0), run("model", 0.39, 1.0)]
    titles = re.findall(r"<title>(.*?)</title>", error_histogram(runs))
    assert titles == [
        "1 site run(s) at 0 to 10 % of the tolerance",
        "1 site run(s) at 30 to 40 % of the tolerance",
        "1 model run(s) at 30 to 40 % of the tolerance",
        "1 site run(s) at 90 to 100 % of the tolerance",
    ]


def test_bars_are_as_long_as_the_seconds() -> None:
    svg = seconds_bars({"export": 8.0, "check": 2.0, "find": 0.0})
    widths = [float(w) for w in re.findall(r'<rect[^>]* width="([\d.]+)"', svg)]
    assert widths[0] == pytest.approx(4 * widths[1])
    assert widths[2] == 1
    assert "2.00 s" in svg


def test_no_seconds_are_an_empty_plot() -> None:
    assert "<rect" not in seconds_bars({})
