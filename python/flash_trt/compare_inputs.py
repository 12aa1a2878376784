# SPDX-License-Identifier: Apache-2.0
"""The inputs of a comparison: the user's values, or drawn ones that respect what each input is for."""

from __future__ import annotations

import dataclasses
import itertools
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import onnx_ir as ir

from flash_export.draw import PADDINGS, Padding, draw_inputs, dynamic_dims, sizes_to_try
from flash_export.errors import UsageError
from flash_export.extent import Extent
from flash_export.input_roles import fed_inputs, read_roles
from flash_export.longer import Longer, longer_setting
from flash_export.talk import Talk
from flash_export.trials import MOST_ELEMENTS, Trial, read_values, roomy_choices
from flash_trt import engine_file, input_types, shape_agreement
from flash_trt.compare_ranges import Values, rooms
from flash_trt.engine_file import EngineFile
from flash_trt.onnx_file import OnnxFile

_SPREADS = (1.0, 3.0)
"""Standard deviations of drawn floats, taken in turn: ordinary, and so wide that softmax is peaky."""

_LEAST_SETTINGS = 3

_FIRST_KEY_KEPT: tuple[Padding, ...] = ("holes", "right")
"""Paddings that can leave the first key visible, and with it a key for every row of a causal mask; taken in turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class InputOptions:
    """What the user asked of the inputs; see ``flash-trt compare --help``."""

    shapes: tuple[str, ...] = ()
    values: Path | None = None
    seed: int = 0
    repeats: int = 2


def plan_runs(
    options: InputOptions,
    reference: OnnxFile,
    engine: EngineFile | None = None,
    talk: Talk | None = None,
) -> list[Sequence[Trial]]:
    """The inputs of every run: ``values`` alone where given, else drawn ones.

    Drawn: three odd settings of the dynamic dims (of a static model: three seeds), ``repeats`` times, with paddings and
    spreads in turn; smaller ones where tensors would be large, see ``roomy_choices``.
    Each run is a list of choices, of which the first that the model takes counts: exporters give one length several
    names, and only the model knows which must be equal.

    Args:
        engine: one that runs as FUSED. Each of its profiles has settings of its own, inside its shapes.
        talk: told of values that are not of the model's types.

    Raises:
        UsageError: a shape or the values do not fit the model or the engine, or an input cannot be drawn.
    """
    model = ir.load(reference.path, format="protobuf")
    if options.values is not None:
        given = read_values(model, options.values)
        _require_no_others(options.values, given)
        dtypes = {name: value.dtype.numpy() for name, value in fed_inputs(model).items() if value.dtype is not None}
        values = {
            name: array
            if dtypes.get(name) == np.dtype(object)  # text
            else input_types.typed(f"--values {options.values}, array {name}", array, dtypes.get(name))
            for name, array in given.items()
        }
        if talk is not None:
            input_types.warn(given, values, talk)
        for graph_input in reference.inputs:
            where = f"--values {options.values}, array {graph_input.name}"
            shape_agreement.require_taken(where, graph_input, values[graph_input.name].shape, reference.dim_ranges)
        shape_agreement.require_alike(
            f"--values {options.values}", reference.inputs, {name: array.shape for name, array in values.items()}
        )
        if engine:
            engine_file.require_shapes(engine, values)
        return [[Trial("values", values)]]
    every = rooms(options.shapes, reference, engine)
    batches, extent = [name for name, is_batch in dynamic_dims(model).items() if is_batch], Extent(model)
    settings = [
        (room.kept(roomy_choices(choices, extent, batches, keep_batch=i == 0)), room.values)  # all outputs are kept
        for room in every
        for i, choices in enumerate(sizes_to_try(model, room.ranges))
    ]
    turns = max(len(settings), _LEAST_SETTINGS) * max(1, options.repeats)
    planned = [settings[turn % len(settings)] for turn in range(turns)]
    return [
        [_trial(model, sizes, options.seed, turn, values=values) for sizes in choices]
        for turn, (choices, values) in enumerate(planned)
    ]


def plan_longer(
    options: InputOptions,
    reference: OnnxFile,
    engine: EngineFile | None = None,
    *,
    taken: Sequence[Trial],
    windows: Collection[int] = (),
) -> LongerTrials | None:
    """The inputs of one more run, which is longer than ``windows``; see ``longer``.

    None where it needs none, and where the user gives the values.

    Args:
        options, reference, engine: as ``plan_runs`` was given them.
        taken: those of its inputs that REFERENCE took: lengths that it refuses show no window.
        windows: the sizes of the windows of FUSED's attentions.
    """
    if options.values is not None:
        return None
    model = ir.load(reference.path, format="protobuf")
    every = rooms(options.shapes, reference, engine)
    sizes = [trial.sizes for trial in taken if trial.sizes]
    longer = longer_setting(model, sizes, [room.ranges for room in every], windows, most=MOST_ELEMENTS)
    if longer and longer.choices:
        held = tuple(choice for choice in longer.choices if any(room.holds(choice) for room in every))
        longer = dataclasses.replace(longer, choices=held) if held else None
    turn = len(taken) + len(taken) % len(_SPREADS)  # ordinary numbers: with wide ones a row may see one key alone
    return LongerTrials(model, longer, options.seed, turn, every[0].values) if longer else None


def _require_no_others(path: Path, taken: Iterable[str]) -> None:
    """Refuses arrays that are no input of the model, as ``run`` does: a misspelled name would not be compared."""
    with zipfile.ZipFile(path) as archive:
        unknown = sorted({name.removesuffix(".npy") for name in archive.namelist()} - set(taken))
    if unknown:
        raise UsageError(
            "the values hold an array that is no input of the model",
            where=f"--values {path}",
            got=", ".join(unknown)[:200],
            need=f"{', '.join(taken) or 'none'} alone",
            do="leave it out, or correct its name",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnTrial(Trial):
    """Drawn inputs that can be drawn again with another padding. ``turn`` is the run's number."""

    model: ir.Model | None = None
    first_seed: int = 0
    turn: int = 0
    values: Values = dataclasses.field(default_factory=dict)

    @property
    def others(self) -> Iterator[Trial]:
        """The same sizes and seed with paddings that hide no first key; none where the model has no mask.

        A causal mask over left padding, or a hole at the first key, hides all keys of a row: NaN where a model hides by
        minus infinity, and by definition 0 in a FlashAttention node. Last come masks in which 1 means hidden.
        """
        if self.model is None:
            return
        masks = [name for name, role in read_roles(self.model).items() if role.kind == "mask"]
        for inverted, step in itertools.product((False, True), range(len(_FIRST_KEY_KEPT)) if masks else ()):
            padding = _FIRST_KEY_KEPT[(self.turn + step) % len(_FIRST_KEY_KEPT)]
            other = _trial(self.model, self.sizes or {}, self.first_seed, self.turn, padding, values=self.values)
            feeds = dict(other.feeds)
            for name in masks:
                visible = feeds[name].astype(bool)
                visible[..., :1] = True
                feeds[name] = (visible != inverted).astype(feeds[name].dtype)
            yield Trial(f"{other.name} inverted" if inverted else other.name, feeds, other.sizes)


class LongerTrials(Sequence[Trial]):
    """The choices of the run that is longer than the windows, each drawn when it is asked for: they can be large.

    ``names`` and ``too_large`` are those of ``Longer``.
    """

    def __init__(self, model: ir.Model, longer: Longer, seed: int, turn: int, values: Values) -> None:
        self.names, self.too_large = longer.names, longer.too_large
        self._choices = longer.choices
        self._draw = lambda sizes: _trial(model, sizes, seed, turn, "full", values=values)
        self._last: tuple[int, Trial] | None = None

    def __len__(self) -> int:
        return len(self._choices)

    @overload
    def __getitem__(self, index: int) -> Trial: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trial]: ...
    def __getitem__(self, index: int | slice) -> Trial | list[Trial]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._last is None or self._last[0] != index:
            self._last = index, self._draw(self._choices[index])
        return self._last[1]


def _trial(
    model: ir.Model,
    sizes: dict[str, int],
    first_seed: int,
    turn: int,
    padding: Padding | None = None,
    *,
    values: Values,
) -> DrawnTrial:
    """Drawn inputs; those that have ``values`` get the usual, the largest and the smallest in turn."""
    seed, spread = first_seed + turn, _SPREADS[turn % len(_SPREADS)]
    padding = padding or PADDINGS[turn % len(PADDINGS)]
    own = {name: triple[(turn + 1) % len(triple)] for name, triple in values.items()}
    numbers = [f"{name}={'x'.join(map(str, array.flat))}" for name, array in own.items()]
    settled = [f"{dim}={size}" for dim, size in sizes.items()]
    name = " ".join([*settled, *numbers, f"seed={seed}", padding, f"x{spread:g}"])
    feeds = draw_inputs(model, sizes, seed, padding, spread=spread) | own
    return DrawnTrial(name, feeds, sizes, model=model, first_seed=first_seed, turn=turn, values=values)
