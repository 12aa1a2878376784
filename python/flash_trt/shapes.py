# SPDX-License-Identifier: Apache-2.0
"""The shapes an engine must serve, in trtexec's spelling: ``input_ids:1x1,4x512,8x4096`` (min, opt, max)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from flash_export.errors import UsageError
from flash_trt.lengths import LARGEST_DIM
from flash_trt.onnx_file import GraphInput
from flash_trt.settled import Settled, Triple

_SHAPE = re.compile("[0-9]+(x[0-9]+)*")

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeRange:
    """The smallest, the most usual and the largest shape of one input."""

    name: str
    smallest: Dims
    usual: Dims
    largest: Dims

    def __str__(self) -> str:
        every = [spell(dims) for dims in (self.smallest, self.usual, self.largest)]
        return f"{self.name}:{every[0] if len(set(every)) == 1 else ','.join(every)}"


def spell(dims: Dims) -> str:
    """``(4, 512)`` -> ``4x512``."""
    return "x".join(map(str, dims))


def size(text: str) -> int | None:
    """The size of a dim that ``text`` spells in digits; None where it spells none, or one that no engine takes."""
    number = int(text) if re.fullmatch("[0-9]{1,10}", text) else LARGEST_DIM + 1
    return number if number <= LARGEST_DIM else None


def parse(text: str) -> ShapeRange:
    """Reads ``NAME:MIN,OPT,MAX``; one shape alone stands for all three.

    Raises:
        UsageError: it is spelled otherwise, the three differ in rank, or they do not grow.
    """
    name, colon, shapes = text.rpartition(":")  # a name may hold colons itself, as TensorFlow's do
    spelled = shapes.split(",")
    if not colon or not name or len(spelled) not in (1, 3) or not all(_SHAPE.fullmatch(s) for s in spelled):
        raise _wrong(
            text, "NAME:MIN,OPT,MAX, each like 4x512", "spell it as trtexec does: --shape ids:1x1,4x512,8x4096"
        )
    sizes = [[size(dim) for dim in shape.split("x")] for shape in spelled]
    if any(dim is None for shape in sizes for dim in shape):
        raise _wrong(text, f"dims of at most {LARGEST_DIM}", "give sizes that fit a machine's memory")
    dims = [tuple(dim or 0 for dim in shape) for shape in sizes]
    smallest, usual, largest = dims if len(dims) == 3 else dims * 3
    if not len(smallest) == len(usual) == len(largest):
        raise _wrong(text, "three shapes of one rank", "give each of the three all dims")
    if not all(low <= mid <= high for low, mid, high in zip(smallest, usual, largest, strict=True)):
        raise _wrong(text, "MIN <= OPT <= MAX in every dim", "order the three shapes from small to large")
    return ShapeRange(name, smallest, usual, largest)


def _wrong(text: str, need: str, do: str) -> UsageError:
    return UsageError("a shape cannot be read", where="--shape", got=repr(text)[:200], need=need, do=do)


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """The shapes of every dynamic input, and the lengths by their names.

    ``chosen`` are those of ``lengths`` that were chosen for want of a ``--shape``.
    """

    ranges: tuple[ShapeRange, ...]
    chosen: dict[str, Triple]
    lengths: dict[str, Triple] = dataclasses.field(default_factory=dict)

    def trtexec_flags(self) -> list[str]:
        """The same shapes as words of a command line of ``trtexec``; none for a static model."""
        return [f"--{kind}Shapes={shapes}" for kind, shapes in self._columns().items()]

    def provider_parameters(self) -> dict[str, str]:
        """The same shapes as options of ONNX Runtime's TensorRT provider; none for a static model."""
        return {f"trt_profile_{kind}_shapes": shapes for kind, shapes in self._columns().items()}

    def _columns(self) -> dict[str, str]:
        kinds = {"min": "smallest", "opt": "usual", "max": "largest"} if self.ranges else {}
        return {
            kind: ",".join(f"{range_.name}:{spell(getattr(range_, field))}" for range_ in self.ranges)
            for kind, field in kinds.items()
        }

    def as_json(self) -> dict[str, dict[str, list[int]]]:
        """name -> {"min", "opt", "max"}."""
        return {r.name: {"min": [*r.smallest], "opt": [*r.usual], "max": [*r.largest]} for r in self.ranges}


def plan_profiles(
    inputs: Sequence[GraphInput], given: Sequence[ShapeRange], limits: Mapping[str, tuple[int, int]] | None = None
) -> tuple[Profile, ...]:
    """As many profiles as an input has shapes in ``given``, at least one; each as ``plan_profile`` makes it.

    The first shapes that each input is given make the first profile, the second ones the second. An input that is given
    one shape has it in every profile.

    Raises:
        UsageError: as ``plan_profile``; inputs with several shapes have not as many, or two profiles are the same.
    """
    by_name: dict[str, list[ShapeRange]] = {}
    for range_ in given:
        by_name.setdefault(range_.name, []).append(range_)
    counts = {name: len(mine) for name, mine in by_name.items() if len(mine) > 1}
    if len(set(counts.values())) > 1:
        raise UsageError(
            "it is not told which shapes make a profile",
            where="--shape",
            got=", ".join(f"{count} for {name}" for name, count in counts.items()),
            need="as many shapes for each input that has several: the first ones are the first profile's",
            do="give each of these inputs a --shape for each profile, or one that holds in all",
        )
    sets = [
        [mine[turn if len(mine) > 1 else 0] for mine in by_name.values()]
        for turn in range(max(counts.values(), default=1))
    ]
    profiles = tuple(_numbered(number, len(sets), inputs, one, limits) for number, one in enumerate(sets))
    if twice := [profile for profile in profiles if [p.ranges for p in profiles].count(profile.ranges) > 1]:
        raise UsageError(
            "two optimization profiles are the same",
            where="--shape",
            got=" ".join(map(str, twice[0].ranges)) or "no shapes: the model is static",
            need="other shapes in each: an input's second --shape makes a second profile",
            do="give each input one --shape, or other shapes for the second profile",
        )
    return profiles


def _numbered(
    number: int,
    count: int,
    inputs: Sequence[GraphInput],
    given: Sequence[ShapeRange],
    limits: Mapping[str, tuple[int, int]] | None,
) -> Profile:
    """``plan_profile``, whose error says of which profile it is, where there are several."""
    try:
        return plan_profile(inputs, given, limits)
    except UsageError as error:
        if count > 1:
            error.where += f", profile {number}"
        raise


def plan_profile(
    inputs: Sequence[GraphInput], given: Sequence[ShapeRange], limits: Mapping[str, tuple[int, int]] | None = None
) -> Profile:
    """The shapes of every dynamic input: as ``given``, and for the rest by symbol, then by default.

    A symbol that one ``--shape`` settles (``batch`` of ``input_ids``) holds for every other input that has it. A dim
    that is an expression of symbols (``seq + past``) has no length of its own: see ``settled``.

    Args:
        limits: symbol -> smallest and largest length with which the model works, where the file says so.

    Raises:
        UsageError: ``given`` names no input, names one twice, contradicts a dim or a symbol of the model, or leaves
            ``limits``.
    """
    by_name = {i.name: i for i in inputs}
    for range_ in given:
        if range_.name not in by_name:
            raise UsageError(
                "a shape is given for no input",
                where="--shape",
                got=str(range_),
                need=f"one of {', '.join(by_name)}" if by_name else "none: the model has no inputs",
                do="correct the name; flash-trt spells inputs as the ONNX file does",
            )
        if len(same := [r for r in given if r.name == range_.name]) > 1:
            raise UsageError(
                "a shape is given twice",
                where=f"--shape, input {range_.name}",
                got=" and ".join(map(str, same)),
                need="one range for each input: flash-trt build alone takes several, a profile of each",
                do="give one of them",
            )
    of_shapes = [range_ for range_ in given if not is_of_values(by_name[range_.name], range_)]
    settled = Settled(inputs, of_shapes, limits or {})
    covered = {r.name: r for r in given}
    ranges = [
        covered.get(i.name) or ShapeRange(i.name, *settled.shape(i))
        for i in inputs
        if i.is_dynamic or i.name in covered
    ]
    return Profile(tuple(ranges), settled.chosen, settled.triples)


def is_of_values(graph_input: GraphInput, range_: ShapeRange) -> bool:
    """Whether the range may be of the numbers in the tensor; whether TensorRT reads it so, only TensorRT knows."""
    return graph_input.may_hold_sizes and len(range_.smallest) == math.prod(map(int, graph_input.dims))


def given_values(inputs: Sequence[GraphInput], given: Sequence[ShapeRange]) -> dict[str, tuple[np.ndarray, ...]]:
    """Input -> its smallest, usual and largest values, where a range is of the numbers in the tensor."""
    by_name = {i.name: i for i in inputs}
    return {
        range_.name: tuple(
            np.array(numbers, graph_input.numpy_dtype).reshape([int(dim) for dim in graph_input.dims])
            for numbers in (range_.smallest, range_.usual, range_.largest)
        )
        for range_ in given
        if is_of_values(graph_input := by_name[range_.name], range_)
    }


def as_drawn(found: Mapping[str, Triple], inputs: Sequence[GraphInput]) -> dict[str, Triple]:
    """The same lengths under the names that ``flash_export.draw`` has for them: dims that the file does not name."""
    nameless = {f"{i.name}[{axis}]": f"{i.name}.{axis}" for i in inputs for axis, dim in enumerate(i.dims) if dim == ""}
    return {nameless.get(name, name): triple for name, triple in found.items()}
