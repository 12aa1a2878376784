# SPDX-License-Identifier: Apache-2.0
"""Masks that hide every key of a row, for the check of each attention alone.

The masks that are drawn leave each row a key, since many a model has nothing to say about a batch entry without one.
But what its attentions give there tells a number that is added from one that replaces scores, and both from minus
infinity. So the masks of one run are changed, what they make at the sites' boundaries is computed anew, and all else
there stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.boundary import Boundary
from flash_export.captured import Seen
from flash_export.cut import CannotCut, cut, reaches
from flash_export.evaluate import MAX_NODES, PURE_OPS
from flash_export.input_roles import read_roles
from flash_export.runtime import CannotRun, open_session
from flash_export.trials import Trial

_MAKES_MASKS = PURE_OPS | {"IsInf", "IsNaN", "OneHot", "Shape", "Size"}
"""What makes a mask of a mask. Behind anything else lies the model, which is not run once more."""


class HiddenRows:
    """What stands at the boundaries of sites when one entry of each mask of the model hides all keys."""

    def __init__(self, plain: ir.Model, trials: Sequence[Trial], seen: Mapping[str, Seen], folder: Path) -> None:
        """Changes the masks of a trial that was drawn.

        Args:
            plain: the unfused model in float32.
            trials: those that it ran on.
            seen: trial name -> what the boundary values were.
            folder: for temporary files.
        """
        self._plain, self._folder = plain, folder
        self._values = ir.convenience.create_value_mapping(plain.graph, include_subgraphs=False)
        self._masks = {name for name, role in read_roles(plain).items() if role.kind == "mask"}
        self._known: dict[str, list[np.ndarray] | None] = {}
        self._trial = _smallest([t for t in trials if t.sizes is not None], seen, self._masks) if self._masks else None
        self._settings = {} if self._trial is None else _changed(self._trial, self._masks)

    def of(self, boundary: Boundary, seen: Mapping[str, Seen]) -> dict[str, Seen]:
        """A name of the run -> its boundary values; nothing where what a mask becomes there is made of more than masks.

        Args:
            boundary: that of one site.
            seen: trial name -> what the boundary values were.
        """
        if self._trial is None:
            return {}
        captured = [name for name in boundary.captured if name in self._values]
        before = seen[self._trial.name]
        masked = [name for name in captured if not self._masks.isdisjoint(reaches(self._values[name]))]
        found: dict[str, Seen] = {}
        for i, what in enumerate(self._settings):
            made = {name: arrays[i] for name in masked if (arrays := self._made(name)) is not None}
            same_shape = len(made) == len(masked) and all(_is_like(before[name], a) for name, a in made.items())
            if same_shape and any((a != before[name]).any() for name, a in made.items()):
                found[f"{self._trial.name} {what}"] = {**before, **made}
        return found

    def _made(self, name: str) -> list[np.ndarray] | None:
        """What a value is at each setting; None where other operators than those of masks make it."""
        if name not in self._known:
            try:
                self._known[name] = self._compute(name)
            except (CannotCut, CannotRun):
                self._known[name] = None
        return self._known[name]

    def _compute(self, name: str) -> list[np.ndarray] | None:
        assert self._trial is not None
        inputs = _inputs_above(self._values[name], self._trial.feeds)
        if inputs is None:
            return None
        feeds = [{n: masks.get(n, self._trial.feeds[n]) for n in inputs} for masks in self._settings.values()]
        if name in inputs:
            return [arrays[name] for arrays in feeds]
        session = open_session(cut(self._plain, inputs, [name]), self._folder)
        return [session.run(arrays, [name])[0] for arrays in feeds]


def _inputs_above(value: ir.Value, fed: Collection[str]) -> list[str] | None:
    """The inputs that a value is made of, or whose lengths it has; None where more than masks goes into it."""
    found, todo, seen = [], [value], {value}
    while todo:
        current = todo.pop()
        node = current.producer()
        if node is None:
            if current.name in fed:
                found.append(current.name or "")
            elif not current.is_initializer():
                return None
            continue
        if not g.is_op(node, *_MAKES_MASKS) or len(seen) > MAX_NODES:
            return None
        new = [v for v in node.inputs if v is not None and v not in seen]
        seen.update(new)
        todo.extend(new)
    return found


def _is_like(before: object, array: np.ndarray) -> bool:
    return isinstance(before, np.ndarray) and before.shape == array.shape


def _smallest(trials: Sequence[Trial], seen: Mapping[str, Seen], masks: Collection[str]) -> Trial | None:
    """The trial with the fewest numbers at the boundaries, of those where a mask has several entries if there are."""

    def numbers(trial: Trial) -> int:
        shapes = (v if isinstance(v, tuple) else getattr(v, "shape", ()) for v in seen[trial.name].values())
        return sum(int(np.prod(shape)) for shape in shapes)

    several = [t for t in trials if any(_entries(t.feeds[name]) is not None for name in masks)]
    return min(several or trials, key=numbers, default=None)


def _changed(trial: Trial, masks: Collection[str]) -> dict[str, dict[str, np.ndarray]]:
    """The masks of a trial, the first entry of each all 0 and the last all 1: one of the two hides, the other does not.

    Where no mask has several entries they are all 0 in one setting, and all 1 in another.
    """
    drawn = {name: np.array(trial.feeds[name]) for name in masks}
    several = {name: axis for name, array in drawn.items() if (axis := _entries(array)) is not None}
    if not several:
        long = {name: array for name, array in drawn.items() if array.shape[-1:] > (1,)}
        return {f"masks={n}": {name: np.full_like(a, n) for name, a in long.items()} for n in (0, 1)}
    for name, axis in several.items():
        entries = np.moveaxis(drawn[name], axis, 0)
        entries[0], entries[-1] = 0, 1
    return {"masks=0,1": drawn}


def _entries(mask: np.ndarray) -> int | None:
    """The axis before that of the keys along which a mask has several entries."""
    return next((axis for axis, size in enumerate(mask.shape[:-1]) if size > 1), None)
