# SPDX-License-Identifier: Apache-2.0
"""A comparison's JSON as one page: what failed and why, each output's worst run, every verdict. See ``html_page``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flash_export import html_page
from flash_export.report_plots import error_histogram, shares
from flash_trt import __version__
from flash_trt.verdict import PROVES_NOTHING

Verdict = Mapping[str, Any]


def as_html(document: Mapping[str, Any]) -> str:
    """The page for ``document``, what ``flash-trt compare --json`` writes (schema 1)."""
    verdicts = document["outputs"]
    by_output: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_output.setdefault(verdict["output"], []).append(verdict)
    # The plots are those of flash-export's report, where a comparison of whole models is of this kind.
    passed = [{**verdict, "kind": "model"} for verdict in verdicts if verdict["kind"] == "passed"]
    measured = shares(passed)["model"]
    return html_page.render(
        "flash_trt",
        "compare.html.j2",
        version=__version__,
        document=document,
        failed=[verdict for verdict in verdicts if _failed(verdict)],
        worst=[(max(mine, key=nearness), len(mine)) for mine in by_output.values()],
        worst_share=max(measured, default=None),
        histogram=error_histogram(passed) if measured else None,
        number=_number,
        colour=_colour,
    )


def nearness(verdict: Verdict) -> tuple[bool, bool, float]:
    """How near to failing: a failed one comes first, one that compared nothing last."""
    error, tolerance = verdict["max_abs_error"], verdict["tolerance"]
    share = error / tolerance if error is not None and tolerance else 0.0
    return _failed(verdict), verdict["kind"] == "passed", share


def _failed(verdict: Verdict) -> bool:
    return verdict["kind"] not in ("passed", *PROVES_NOTHING)


def _colour(verdict: Verdict) -> str:
    return "bad" if _failed(verdict) else "good" if verdict["kind"] == "passed" else "soft"


def _number(number: float | None) -> str:
    """Three digits; a dash for what JSON cannot hold or no run measured."""
    return "–" if number is None else f"{number:.3g}"
