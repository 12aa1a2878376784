# SPDX-License-Identifier: Apache-2.0
"""The inputs of a comparison: the user's values, or drawn ones that respect what each input is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from flash_export.draw import PADDINGS, draw_inputs, dynamic_dims, sizes_to_try
from flash_export.trials import Trial, read_values
from flash_trt import shapes
from flash_trt.onnx_file import OnnxFile

_SPREADS = (1.0, 3.0)
"""Standard deviations of drawn floats, taken in turn: ordinary, and so wide that softmax is peaky."""

_LEAST_SETTINGS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class InputOptions:
    """What the user asked of the inputs; see ``flash-trt compare --help``."""

    shapes: tuple[str, ...] = ()
    values: Path | None = None
    seed: int = 0
    repeats: int = 2


def plan_runs(options: InputOptions, reference: OnnxFile, limits: Sequence[str] = ()) -> list[list[Trial]]:
    """The inputs of every run: ``values`` alone where given, else drawn ones.

    Drawn: three odd settings of the dynamic dims (of a static model: three seeds), ``repeats`` times, with paddings and
    spreads in turn.
    Each run is a list of choices, of which the first that the model takes counts: exporters give one length several
    names, and only the model knows which must be equal.

    Args:
        limits: shapes as ``--shape`` spells them, that hold where the options name none.

    Raises:
        UsageError: a shape or the values do not fit, or an input cannot be drawn.
    """
    model = ir.load(reference.path, format="protobuf")
    if options.values is not None:
        values = read_values(model, options.values)
        for graph_input in reference.inputs:
            where = f"--values {options.values}, array {graph_input.name}"
            shapes.require_taken(where, graph_input, values[graph_input.name].shape, reference.dim_ranges)
        return [[Trial("values", values)]]
    settings = sizes_to_try(model, _ranges(options.shapes or tuple(limits), reference, model))
    return [
        [_trial(model, sizes, options.seed, turn) for sizes in settings[turn % len(settings)]]
        for turn in range(max(len(settings), _LEAST_SETTINGS) * max(1, options.repeats))
    ]


def _trial(model: ir.Model, sizes: dict[str, int], first_seed: int, turn: int) -> Trial:
    seed, padding, spread = first_seed + turn, PADDINGS[turn % len(PADDINGS)], _SPREADS[turn % len(_SPREADS)]
    name = " ".join([*(f"{dim}={size}" for dim, size in sizes.items()), f"seed={seed}", padding, f"x{spread:g}"])
    return Trial(name, draw_inputs(model, sizes, seed, padding, spread=spread), sizes)


def _ranges(given: Sequence[str], reference: OnnxFile, model: ir.Model) -> dict[str, tuple[int, int]]:
    """What ``given`` shapes, or else the file, say of each dynamic dim, under the names that ``draw`` gives them."""
    parsed = [shapes.parse(text) for text in given]
    shapes.plan_profile(reference.inputs, parsed, reference.dim_ranges)  # refuses what contradicts the model
    known = dynamic_dims(model)
    by_name = {graph_input.name: graph_input for graph_input in reference.inputs}
    ranges = dict(reference.dim_ranges)
    for range_ in parsed:
        for axis, dim in enumerate(by_name[range_.name].dims):
            name = dim or f"{range_.name}.{axis}"
            if name in known:
                ranges[str(name)] = (range_.smallest[axis], range_.largest[axis])
    return ranges
