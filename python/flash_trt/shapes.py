# SPDX-License-Identifier: Apache-2.0
"""The shapes an engine must serve, in trtexec's spelling: ``input_ids:1x1,4x512,8x4096`` (min, opt, max)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flash_export import dim_ranges
from flash_export.dims import Dim
from flash_export.errors import UsageError
from flash_trt.onnx_file import GraphInput

# What a dynamic dim gets when --shape says nothing: the first axis is nearly always the batch, the rest lengths.
_DEFAULT_BATCH = (1, 1, 8)
_DEFAULT_LENGTH = (1, 128, 512)
_DEFAULT_PAST = (0, 128, 512)

LARGEST_DIM = 2**31 - 1
"""TensorRT counts a tensor's dims in 32 bits."""

_LONGEST_EXPRESSION = 500
"""Characters of a ``dim_param`` that is read as an expression."""

_SHAPE = re.compile("[0-9]+(x[0-9]+)*")

Dims = tuple[int, ...]
_Triples = dict[str, tuple[int, int, int]]
"""A symbol, or an expression of symbols as the file spells it -> its smallest, usual and largest length."""


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
    """The shapes of every dynamic input, and which symbols were chosen for want of a ``--shape``."""

    ranges: tuple[ShapeRange, ...]
    chosen: dict[str, tuple[int, int, int]]

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
    profiles = tuple(
        plan_profile(inputs, [mine[turn if len(mine) > 1 else 0] for mine in by_name.values()], limits)
        for turn in range(max(counts.values(), default=1))
    )
    if twice := [profile for profile in profiles if [p.ranges for p in profiles].count(profile.ranges) > 1]:
        raise UsageError(
            "two optimization profiles are the same",
            where="--shape",
            got=" ".join(map(str, twice[0].ranges)) or "no shapes: the model is static",
            need="other shapes in each: an input's second --shape makes a second profile",
            do="give each input one --shape, or other shapes for the second profile",
        )
    return profiles


def plan_profile(
    inputs: Sequence[GraphInput], given: Sequence[ShapeRange], limits: Mapping[str, tuple[int, int]] | None = None
) -> Profile:
    """The shapes of every dynamic input: as ``given``, and for the rest by symbol, then by default.

    A symbol that one ``--shape`` settles (``batch`` of ``input_ids``) holds for every other input that has it. A dim
    that is an expression of symbols (``seq + past``) has no length of its own: it is computed from theirs.

    Args:
        limits: symbol -> smallest and largest length with which the model works, where the file says so.

    Raises:
        UsageError: ``given`` names no input, names one twice, contradicts a dim or a symbol of the model, or leaves
            ``limits``.
    """
    limits = limits or {}
    by_name = {i.name: i for i in inputs}
    symbols: _Triples = {}
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
    of_shapes = [range_ for range_ in given if not _is_of_values(by_name[range_.name], range_)]
    for range_ in of_shapes:
        _settle(by_name[range_.name], range_, symbols)
        _require_within(by_name[range_.name], range_, limits)
    for range_ in of_shapes:
        _solve(by_name[range_.name], range_, symbols, limits)
    chosen = _defaults(inputs, symbols, limits)
    for range_ in of_shapes:
        _require_sums(by_name[range_.name], range_, symbols | chosen)
    covered = {r.name: r for r in given}
    every = _with_expressions(inputs, symbols | chosen)
    ranges = [covered.get(i.name) or _by_symbol(i, every) for i in inputs if i.is_dynamic or i.name in covered]
    return Profile(tuple(ranges), chosen)


def _is_of_values(graph_input: GraphInput, range_: ShapeRange) -> bool:
    """Whether the range may be of the numbers in the tensor; whether TensorRT reads it so, only TensorRT knows."""
    return graph_input.may_hold_sizes and len(range_.smallest) == math.prod(map(int, graph_input.dims))


def _settle(graph_input: GraphInput, range_: ShapeRange, symbols: _Triples) -> None:
    """Checks ``range_`` against the model's dims and writes down what it says of each symbol."""
    triples = list(zip(range_.smallest, range_.usual, range_.largest, strict=True))
    need = spell_dims(graph_input)
    if len(triples) != len(graph_input.dims):
        raise _contradiction(range_, f"rank {len(graph_input.dims)}: {need}")
    for axis, (dim, triple) in enumerate(zip(graph_input.dims, triples, strict=True)):
        if isinstance(dim, int) and triple != (dim, dim, dim):
            raise _contradiction(range_, f"{dim} where the model fixes it: {need}")
        symbol = _symbol(graph_input, axis)
        if isinstance(dim, str) and symbols.setdefault(symbol, triple) != triple:
            raise _contradiction(range_, f"{symbol} = {','.join(map(str, symbols[symbol]))}, as another --shape says")


def _require_within(graph_input: GraphInput, range_: ShapeRange, limits: Mapping[str, tuple[int, int]]) -> None:
    """Refuses lengths with which the model does not work, such as more positions than it has."""
    for dim, low, high in zip(graph_input.dims, range_.smallest, range_.largest, strict=True):
        known = limits.get(dim) if isinstance(dim, str) else None
        if known and not _lie_within(known, low, high):
            raise _outside(graph_input, range_, str(dim), known)


def _lie_within(known: tuple[int, int], *lengths: int) -> bool:
    """A length of 0 is taken where the smallest is 1: that 1 is the least that PyTorch traces, and says nothing of a
    tensor without elements. Where the model fails on it, the runtime says so.
    """
    return all(known[0] <= length <= known[1] or (length == 0 and known[0] == 1) for length in lengths)


def _outside(graph_input: GraphInput, range_: ShapeRange, dim: str, known: tuple[int, int]) -> UsageError:
    return UsageError(
        f"the shape of {range_.name} leaves the range in which the model works",
        where=f"--shape, dim {dim}",
        got=str(range_),
        need=f"{dim} in {dim_ranges.spell(known)}, as the model was exported for: {spell_dims(graph_input)}",
        do=f"keep {dim} in that range, or export the model again for another one",
    )


def _solve(
    graph_input: GraphInput, range_: ShapeRange, symbols: _Triples, limits: Mapping[str, tuple[int, int]]
) -> None:
    """Writes down what ``range_`` says of a symbol that stands in a dim such as ``16*h + 1`` alone."""
    for dim, *sizes in zip(graph_input.dims, range_.smallest, range_.usual, range_.largest, strict=True):
        line = as_dim(dim).as_line() if isinstance(dim, str) and dim else None
        if line is None or (name := line[0]) in symbols:
            continue
        (low, no_low), (mid, no_mid), (high, no_high) = (divmod(size - line[2], line[1]) for size in sizes)
        if no_low or no_mid or no_high or low < 0:
            raise _contradiction(range_, f"a whole number for {name} in {dim}: {spell_dims(graph_input)}")
        symbols[name] = low, mid, high
        known = limits.get(name)
        if known and not _lie_within(known, low, high):
            raise _outside(graph_input, range_, name, known)


def _contradiction(range_: ShapeRange, need: str) -> UsageError:
    return UsageError(
        f"the shape of {range_.name} contradicts the model",
        where="--shape",
        got=str(range_),
        need=need,
        do="give dims that agree; a symbol means the same length everywhere, and one that no --shape names its default",
    )


def require_taken(
    where: str, graph_input: GraphInput, shape: Dims, limits: Mapping[str, tuple[int, int]] | None = None
) -> None:
    """Refuses a tensor for ``graph_input`` whose ``shape`` is not the model's, or leaves ``limits``.

    Raises:
        UsageError: names ``where``, the shape and the range.
    """
    dims, got = graph_input.dims, f"[{', '.join(map(str, shape))}]"
    if len(dims) != len(shape) or any(
        isinstance(dim, int) and dim != size for dim, size in zip(dims, shape, strict=True)
    ):
        raise UsageError(
            "an input has another shape than the model takes",
            where=where,
            got=got,
            need=spell_dims(graph_input),
            do="give a tensor of that shape",
        )
    for dim, size in zip(dims, shape, strict=True):
        known = (limits or {}).get(str(dim), (size, size))
        if not _lie_within(known, size):
            raise UsageError(
                "an input leaves the range in which the model works",
                where=f"{where}, dim {dim}",
                got=got,
                need=f"{dim} in {dim_ranges.spell(known)}: {spell_dims(graph_input)}",
                do=f"give a tensor whose {dim} is in that range, or export the model again for another one",
            )


def spell_dims(graph_input: GraphInput) -> str:
    """``[batch, 12, ?]``."""
    return "[" + ", ".join(str(dim) if dim != "" else "?" for dim in graph_input.dims) + "]"


def _symbol(graph_input: GraphInput, axis: int) -> str:
    """The symbol, or expression, of a dynamic dim; ``x[0]`` where the file has none."""
    return str(graph_input.dims[axis]) or f"{graph_input.name}[{axis}]"


def _dynamic_dims(inputs: Sequence[GraphInput]) -> Iterator[tuple[int, str]]:
    """Axis and symbol of every dynamic dim."""
    for graph_input in inputs:
        yield from ((a, _symbol(graph_input, a)) for a, dim in enumerate(graph_input.dims) if isinstance(dim, str))


def _defaults(inputs: Sequence[GraphInput], settled: _Triples, limits: Mapping[str, tuple[int, int]]) -> _Triples:
    """What each symbol gets that is not ``settled``, within ``limits``.

    One that is only ever a part of a first axis is a batch too; the length of a past may be 0.
    """
    chosen: _Triples = {}
    dims = list(_dynamic_dims(inputs))
    for axis, dim in sorted(dims, key=lambda found: as_dim(found[1]).symbol != found[1]):
        for part in sorted(as_dim(dim).symbols):
            if part not in settled:
                usual = _DEFAULT_BATCH if axis == 0 else _DEFAULT_PAST if part.startswith("past") else _DEFAULT_LENGTH
                chosen.setdefault(part, _clamped(usual, limits.get(part)))
    return chosen


def _clamped(triple: tuple[int, int, int], limits: tuple[int, int] | None) -> tuple[int, int, int]:
    if limits is None:
        return triple
    smallest, usual, largest = (min(max(size, limits[0]), limits[1]) for size in triple)
    return smallest, usual, largest


def as_dim(text: str) -> Dim:
    """``text`` as an expression; one that nobody writes by hand, and that takes long to read, is a name."""
    return Dim.named(text) if len(text) <= _LONGEST_EXPRESSION else Dim({(text,): 1})


def line_in(known: Iterable[str], dim: str) -> tuple[str, int, int]:
    """``("h", 16, 1)`` of ``16*h + 1`` where ``h`` alone is ``known``: the name, its factor and what is added."""
    return (dim, 1, 0) if dim in known else as_dim(dim).as_line() or (dim, 1, 0)


def _evaluate(expression: Dim, symbols: _Triples) -> tuple[int, int, int]:
    """The expression's smallest, usual and largest length.

    Raises:
        UsageError: one of them is no length of a tensor.
    """
    triple = [expression.evaluate({s: symbols[s][i] for s in expression.symbols}) for i in range(3)]
    if not all(0 <= length <= LARGEST_DIM for length in triple):
        parts = ", ".join(f"{part} = {','.join(map(str, symbols[part]))}" for part in sorted(expression.symbols))
        raise UsageError(
            "a dim of the model has no length that a tensor can have",
            where=f"dim {str(expression)[:200]}",
            got=f"less than 0, or more than {LARGEST_DIM}, at {parts}"[:400],
            need=f"0 to {LARGEST_DIM} in every dim",
            do="give smaller lengths with --shape, or correct the dims' names in the model",
        )
    low, mid, high = triple
    return low, mid, high


def _with_expressions(inputs: Sequence[GraphInput], symbols: _Triples) -> _Triples:
    """``symbols`` and every expression of them among the dims; one that a ``--shape`` settles stays as it is."""
    return {dim: _evaluate(as_dim(dim), symbols) for _, dim in _dynamic_dims(inputs)} | symbols


def _require_sums(graph_input: GraphInput, range_: ShapeRange, symbols: _Triples) -> None:
    """Refuses a usual length of an expression that its parts do not give.

    The smallest and largest are bounds, each of its own: the longest total may be less than both longest parts.
    """
    for dim, usual in zip(graph_input.dims, range_.usual, strict=True):
        parts = as_dim(dim).symbols if isinstance(dim, str) and dim else set()
        if parts - {dim} and (wanted := _evaluate(as_dim(str(dim)), symbols)[1]) != usual:
            lengths = ", ".join(f"{part} = {symbols[part][1]}" for part in sorted(parts))
            raise _contradiction(range_, f"{dim} = {wanted} as the usual length, since {lengths}")


def _by_symbol(graph_input: GraphInput, symbols: _Triples) -> ShapeRange:
    """The input's shapes from ``symbols``."""
    triples = [
        (dim, dim, dim) if isinstance(dim, int) else symbols[_symbol(graph_input, axis)]
        for axis, dim in enumerate(graph_input.dims)
    ]
    smallest, usual, largest = zip(*triples, strict=True)
    return ShapeRange(graph_input.name, smallest, usual, largest)
