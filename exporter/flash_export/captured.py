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

from flash_export import graph as g
from flash_export.cut import cut
from flash_export.draw import sizes_in
from flash_export.extent import Extent
from flash_export.runtime import open_session
from flash_export.trials import MOST_ELEMENTS, Trial

SMALL_ELEMENTS = 2**20
"""An array of up to this size is kept in any case."""

SMALL_BESIDE = 32
"""What has this part of a value's elements is small beside it: a row of the scores is as long as there are keys."""

Edge = tuple[str, ...]
"""Names of values that another one is computed from."""

Later = Callable[[], np.ndarray]
"""Runs a part of the unfused model once more for one array."""

Seen = Mapping[str, "np.ndarray | tuple[int, ...] | Later"]
"""What one run of the whole model showed of a boundary: content where it counts, now or later, else its shape."""


def too_large_to_keep(model: ir.Model, trials: Sequence[Sequence[Trial]], names: Collection[str]) -> dict[str, Edge]:
    """Of the values ``names`` those that are large in a trial whose values are too large together.

    Each comes with the values that it is to be computed from: the nearest ones above it that are small beside it, which
    the run of the whole model shows. Where all of these together would be too large as well, and larger than the
    largest of ``names``, they are the model's inputs.
    """
    extent = Extent(model)
    late: dict[str, int] = {}
    for first, *_ in trials:
        counts = {name: extent.elements(name, _sizes(model, first)) for name in names}
        if sum(counts.values()) > MOST_ELEMENTS:
            large = {name: count for name, count in counts.items() if count > SMALL_ELEMENTS}
            late |= {name: max(count, late.get(name, 0)) for name, count in large.items()}
    most = [{n: extent.elements(n, _sizes(model, first)) for n in extent.names} for first, *_ in trials] if late else []
    sizes = {name: max(counts[name] for counts in most) for name in extent.names} if most else {}
    edges = {name: _edge(model, name, count // SMALL_BESIDE, sizes) for name, count in late.items()}
    kept = sum(sizes.get(name, 0) for name in {name for edge in edges.values() for name in edge}) * len(trials)
    if kept > max(MOST_ELEMENTS, *late.values(), 0):
        return {name: _edge(model, name, 0, {}) for name in late}
    return edges


def _sizes(model: ir.Model, trial: Trial) -> Mapping[str, int]:
    return sizes_in(model, trial.feeds) if trial.sizes is None else trial.sizes


def _edge(model: ir.Model, name: str, most: int, sizes: Mapping[str, int]) -> Edge:
    """The nearest values above ``name`` of up to ``most`` elements, and the inputs on the way to which are none."""
    found: dict[str, None] = {}
    known = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    todo = [known[name]]
    seen = set(todo)
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or (value.name != name and 0 < sizes.get(value.name or "", 0) <= most):
            if node is not None or not value.is_initializer():
                found[value.name or ""] = None
            continue
        above = [v for v in g.all_inputs(node) if v not in seen and known.get(v.name or "") is v]
        seen.update(above)
        todo.extend(above)
    return tuple(found)


def later(model: ir.Model, edge: Mapping[str, np.ndarray], name: str, folder: Path) -> Later:
    """What ``name`` holds when the values of its edge are these, computed whenever it is asked for.

    Args:
        model: the unfused model in float32.
    """
    return functools.partial(_run_for, model, edge, name, folder)


def _run_for(model: ir.Model, edge: Mapping[str, np.ndarray], name: str, folder: Path) -> np.ndarray:
    # A session for it alone: one with more outputs would hold all of them until its run ends.
    return open_session(cut(model, list(edge), [name]), folder).run(edge, [name])[0]
