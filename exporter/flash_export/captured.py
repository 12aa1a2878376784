# SPDX-License-Identifier: Apache-2.0
"""What stood at the edge of a site in a run of the whole model: kept, or where it is large computed anew for its use.

A mask or bias that differs for each query and head is as large as the scores. A runtime holds one of them at a time;
all layers' at all settings would be tens of gigabytes of a model that has megabytes of weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import nudge
from flash_export.draw import sizes_in
from flash_export.extent import Extent
from flash_export.runtime import open_session
from flash_export.trials import MOST_ELEMENTS, Trial

SMALL_ELEMENTS = 2**20
"""An array of up to this size is kept in any case."""

Later = Callable[[], np.ndarray]
"""Runs the unfused model once more for one array."""

Seen = Mapping[str, "np.ndarray | tuple[int, ...] | Later"]
"""What one run of the whole model showed of a boundary: content where it counts, now or later, else its shape."""


def too_large_to_keep(model: ir.Model, trials: Sequence[Sequence[Trial]], names: Collection[str]) -> frozenset[str]:
    """Of the values ``names`` those that are large in a trial whose values are too large together."""
    extent = Extent(model)
    late: set[str] = set()
    for first, *_ in trials:
        sizes = sizes_in(model, first.feeds) if first.sizes is None else first.sizes
        counts = {name: extent.elements(name, sizes) for name in names}
        if sum(counts.values()) > MOST_ELEMENTS:
            late.update(name for name, count in counts.items() if count > SMALL_ELEMENTS)
    return frozenset(late)


def later(model: ir.Model, trial: Trial, numbers: Collection[str], name: str, folder: Path) -> Later:
    """What ``name`` holds on the trial's inputs, computed whenever it is asked for.

    Args:
        model: the unfused model with a nudge, in float32.
        numbers: its inputs that are plain numbers.
    """
    return functools.partial(_run_for, model, trial, numbers, name, folder)


def _run_for(model: ir.Model, trial: Trial, numbers: Collection[str], name: str, folder: Path) -> np.ndarray:
    asked = model.clone()
    values = ir.convenience.create_value_mapping(asked.graph, include_subgraphs=False)
    asked.graph.outputs[:] = [values[name]]
    # A session for it alone: one with more outputs would hold all of them until its run ends.
    return open_session(asked, folder).run(nudge.feeds(trial.feeds, numbers, 0), [name])[0]
