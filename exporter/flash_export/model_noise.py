# SPDX-License-Identifier: Apache-2.0
"""What the unfused model itself is off by in float32: its runs beside those of its float64 twin."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import onnx_ir as ir

from flash_export import nudge
from flash_export.accept import Noise
from flash_export.runtime import AnySession, CannotRun, open_float64, open_session
from flash_export.trials import Trial, weight_bytes
from flash_export.twin import NoTwin

FLOAT64_LIMIT_BYTES = 4 * 2**30
"""Weights of a float64 twin; a larger model is measured against its float32 run and a fixed bound."""

_MORE = range(1, 5)
"""The nudges by which the noise of a larger model is measured again, over all of its trials."""


def open_wide(model: ir.Model, folder: Path) -> AnySession | None:
    """The float64 twin; None where it cannot be had or would be too large."""
    if 2 * weight_bytes(model) > FLOAT64_LIMIT_BYTES:
        return None
    try:
        return open_float64(model, folder)
    except NoTwin:
        return None


def measure(
    base: AnySession,
    wide: AnySession,
    trial: Trial,
    outputs: Sequence[str],
    numbers: Collection[str],
    nudges: Iterable[int],
) -> list[list[Noise]]:
    """The rounding of each output at each of ``nudges`` at which the model runs.

    One that goes another way on numbers a hair off, as by a router's choice, may fail there, or give other shapes.

    Args:
        base: the unfused model with ``nudge.add_nudge`` in float32; ``wide`` in float64.
        numbers: the graph inputs that can be nudged.
    """
    measured = []
    for k in nudges:
        feeds = nudge.feeds(trial.feeds, numbers, k)
        try:
            pairs = list(zip(base.run(feeds, outputs), wide.run(feeds, outputs), strict=True))
        except CannotRun:
            continue
        if all(b.shape == r.shape for b, r in pairs):
            measured.append([Noise.between(b, r) for b, r in pairs])
    return measured


def measure_more(nudged: ir.Model, trials: Sequence[Trial], numbers: Collection[str], folder: Path) -> list[Noise]:
    """The rounding of each output of ``nudged`` over all ``trials`` on numbers a hair off; both sessions are opened."""
    base, wide = open_session(nudged, folder), open_float64(nudged, folder)
    names = [v.name or "" for v in nudged.graph.outputs]
    measured = [noises for trial in trials for noises in measure(base, wide, trial, names, numbers, _MORE)]
    return [Noise.pooled(noises[i] for noises in measured) for i in range(len(names))]
