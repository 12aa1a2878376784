# SPDX-License-Identifier: Apache-2.0
"""Between which lengths the inputs of a comparison are drawn: those of ``--shape``, of an engine, and of the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from flash_export.errors import UsageError
from flash_trt import engine_file, lengths, shapes
from flash_trt.engine_file import EngineFile
from flash_trt.onnx_file import GraphInput, OnnxFile
from flash_trt.shapes import Profile, ShapeRange

Ranges = dict[str, tuple[int, int]]
"""Dynamic dim, under the name that ``draw`` gives it -> its smallest and largest length."""

Sizes = dict[str, int]
Values = dict[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """The ``ranges`` of the dims, shapes that some ``inputs`` must stay within, and lengths that do.

    ``values`` are the smallest, the usual and the largest of an input that a shape is computed from.
    """

    ranges: Ranges
    inputs: tuple[tuple[GraphInput, ShapeRange], ...] = ()
    usual: Sizes = dataclasses.field(default_factory=dict)
    values: Values = dataclasses.field(default_factory=dict)

    def holds(self, sizes: Sizes) -> bool:
        """Whether every input has a shape that it may have: the range of a sum may be less than those of its parts."""
        return all(
            length is None or low <= (_size(graph_input, axis, length, sizes) or 0) <= high
            for graph_input, range_ in self.inputs
            for axis, (length, low, high) in enumerate(
                zip(lengths.of(graph_input), range_.smallest, range_.largest, strict=True)
            )
        )

    def kept(self, choices: Sequence[Sizes]) -> list[Sizes]:
        """Those of ``choices`` that it holds; where it holds none, the usual lengths."""
        usual = choices[0] | self.usual
        return [sizes for sizes in choices if self.holds(sizes)] or ([usual] if self.holds(usual) else [*choices])


def _size(graph_input: GraphInput, axis: int, length: lengths.Length, sizes: Sizes) -> int | None:
    return sizes[f"{graph_input.name}.{axis}"] if graph_input.dims[axis] == "" else length.at(sizes)


def rooms(given: Sequence[str], reference: OnnxFile, engine: EngineFile | None) -> list[Room]:
    """What ``given`` shapes, or else the engine or the file, say of each dynamic dim; once for each of its profiles.

    Profiles that do not hold the given shapes are left out.

    Raises:
        UsageError: a shape that contradicts the model, or that no profile holds.
    """
    parsed = [shapes.parse(text) for text in given]
    plan = shapes.plan_profile(reference.inputs, parsed, reference.dim_ranges)
    asked = _room(plan, parsed, reference)
    profiles = engine.profiles if engine else []
    told = [_told(profile, reference) for profile in profiles] or [Room({})]
    holding = [room for room in told if _lies_in(asked, room)]
    if not holding:
        raise UsageError(
            "the engine was not built for these shapes",
            where="--shape",
            got=" ".join(map(str, parsed)),
            need=", or ".join(engine_file.spell_profile(profile) for profile in profiles),
            do="keep --shape inside one of these profiles, or leave it out",
        )
    return [
        Room(
            {**reference.dim_ranges, **room.ranges, **asked.ranges},
            (*room.inputs, *asked.inputs),
            room.usual | (asked.usual if parsed or not room.usual else {}),
            room.values | asked.values,
        )
        for room in holding
    ]


def _room(plan: Profile, given: Sequence[ShapeRange], reference: OnnxFile) -> Room:
    """What a plan settles by the ``given`` shapes, without what it chose itself."""
    by_name = {i.name: i for i in reference.inputs}
    settled = {name: triple for name, triple in plan.lengths.items() if name not in plan.chosen}
    ranges = {name: (low, high) for name, (low, _, high) in shapes.as_drawn(settled, reference.inputs).items()}
    usual = {name: triple[1] for name, triple in shapes.as_drawn(plan.lengths, reference.inputs).items()}
    of_shapes = [(by_name[r.name], r) for r in given if not shapes.is_of_values(by_name[r.name], r)]
    return Room(ranges, tuple(of_shapes), usual, shapes.given_values(reference.inputs, given))


def _told(profile: engine_file.Profile, reference: OnnxFile) -> Room:
    """What an engine's profile says of the inputs; of one that REFERENCE lacks, or has otherwise, nothing."""
    given = []
    for graph_input in reference.inputs:
        limits = profile.get(graph_input.name)
        if limits:
            range_ = ShapeRange(graph_input.name, *(tuple(limits[key]) for key in ("min", "opt", "max")))
            if len(range_.smallest) == len(graph_input.dims) or shapes.is_of_values(graph_input, range_):
                given.append(range_)
    try:
        return _room(shapes.plan_profile(reference.inputs, given), given, reference)
    except UsageError:  # as trtexec builds it, shapes may contradict each other: each is a limit
        by_name = {i.name: i for i in reference.inputs}
        ranges: Ranges = {}
        of_shapes = [(by_name[range_.name], range_) for range_ in given]
        for graph_input, range_ in of_shapes:
            for name, low, high in zip(graph_input.dims, range_.smallest, range_.largest, strict=True):
                if isinstance(name, str) and name and lengths.read(name).is_name:
                    ranges[name] = max(low, ranges.get(name, (low, 0))[0]), min(high, ranges.get(name, (0, high))[1])
        values = shapes.given_values(reference.inputs, given)
        return Room(ranges, tuple(pair for pair in of_shapes if pair[1].name not in values), values=values)


def _lies_in(asked: Room, told: Room) -> bool:
    limits: Mapping[str, ShapeRange] = {range_.name: range_ for _, range_ in told.inputs}
    return all(
        low <= small and large <= high
        for graph_input, range_ in asked.inputs
        for limit in [limits.get(graph_input.name, range_)]
        for low, small, large, high in zip(limit.smallest, range_.smallest, range_.largest, limit.largest, strict=True)
    ) and all(
        told.ranges.get(name, own)[0] <= own[0] and own[1] <= told.ranges.get(name, own)[1]
        for name, own in asked.ranges.items()
    )
