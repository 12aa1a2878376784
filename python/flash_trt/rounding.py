# SPDX-License-Identifier: Apache-2.0
"""REFERENCE's own rounding, seen more often than the runs of a comparison show it.

The largest error of few numbers scatters: a model with one logit can be right by luck, and twice nothing is a tolerance
that no honest model keeps. Small outputs are therefore measured again on numbers a hair off (``flash_export.nudge``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from flash_export import accept, nudge, runtime, twin
from flash_trt.verdict import Outputs, RunOutputs

_FOR_A_HANDFUL = 15
"""False alarms of one logit after eight layers, in 600 honest comparisons of 3 runs: 17 % with none of these, 4 % with
7, 0.7 % with 15, 0.8 % with 31."""


def more_roundings(model: ir.Model, runs: Sequence[RunOutputs], folder: Path) -> list[tuple[Outputs, Outputs]]:
    """Outputs of ``model`` (float32) and of its float64 twin, by name, as often as its smallest output needs it.

    [] where the runs hold numbers enough, or where no more can be had.
    """
    names = [value.name or "" for value in model.graph.outputs]
    smallest = min(sum(run.base[name].size for run in runs) for name in names)
    needed = _FOR_A_HANDFUL if smallest < accept.POOLED_AT_LEAST else accept.roundings(smallest) - 1
    if not needed or any(run.wide is None for run in runs):
        return []
    nudged = nudge.add_nudge(model)
    numbers = nudge.numbers(model)
    try:
        base = runtime.open_session(nudged, _new(folder, "nudged"))
        wide = runtime.open_float64(nudged, _new(folder, "nudged_float64"))
        measured: list[tuple[Outputs, Outputs]] = []
        for k, run in zip(range(1, needed + 1), itertools.cycle(runs), strict=False):
            feeds = nudge.feeds(run.feeds, numbers, k)
            pair = (dict(zip(names, session.run(feeds, names), strict=True)) for session in (base, wide))
            measured.append((next(pair), next(pair)))
        return measured
    except (twin.NoTwin, runtime.CannotRun):
        return []  # the runs' own rounding has to do


def _new(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made
