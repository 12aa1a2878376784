# SPDX-License-Identifier: Apache-2.0
"""What the shapes given with ``--shape`` say of a model's named lengths, and what the lengths say of other dims.

A name that stands alone is what its dim is. Of ``2*n - 1`` the size tells ``n``; of ``past + seq`` it tells the one of
which no other dim tells. A dim that its names settle is computed from them, and a size given for it has to agree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flash_export import dim_ranges
from flash_export.errors import UsageError
from flash_trt import lengths
from flash_trt.lengths import LARGEST_DIM, Length
from flash_trt.onnx_file import GraphInput

if TYPE_CHECKING:
    from flash_trt.shapes import ShapeRange

Triple = tuple[int, int, int]
"""The smallest, the usual and the largest length."""

Limits = Mapping[str, tuple[int, int]]
"""Name -> the smallest and largest length with which the model works, where the file says so."""

# What a dynamic dim gets when --shape says nothing: the first axis is nearly always the batch, the rest lengths.
_DEFAULT_BATCH = (1, 1, 8)
_DEFAULT_LENGTH = (1, 128, 512)
_DEFAULT_PAST = (0, 128, 512)

_MOST_CORNERS = 6
"""Names of one dim of which every pair of bounds is tried; of more the bounds are taken together."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Fact:
    """A size given for a dim that is an expression."""

    graph_input: GraphInput
    range_: ShapeRange
    length: Length
    triple: Triple

    def contradiction(self, need: str) -> UsageError:
        return contradiction(self.range_, need)


class Settled:
    """The lengths by their names: ``triples`` of all, ``chosen`` those for want of a ``--shape``."""

    def __init__(self, inputs: Sequence[GraphInput], given: Sequence[ShapeRange], limits: Limits) -> None:
        """Reads ``given``, shapes of ``inputs``, each of another one.

        Raises:
            UsageError: a shape contradicts a dim, another shape, or ``limits``.
        """
        self._limits, self._by = limits, dict[str, str]()
        self.triples: dict[str, Triple] = {}
        self.chosen: dict[str, Triple] = {}
        self._every = [length for i in inputs for length in lengths.of(i) if length]
        by_name = {i.name: i for i in inputs}
        facts = [fact for range_ in given for fact in self._read(by_name[range_.name], range_)]
        self._solve(facts)
        self.chosen = self._defaults(inputs)
        self.triples |= self.chosen
        for fact in facts:
            self._require(fact)

    def shape(self, graph_input: GraphInput) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The smallest, the usual and the largest shape of an input without a shape of its own."""
        of = zip(graph_input.dims, lengths.of(graph_input), strict=True)
        triples = [self.triple(length) if length else (int(dim), int(dim), int(dim)) for dim, length in of]
        smallest, usual, largest = zip(*triples, strict=True)
        return smallest, usual, largest

    def triple(self, length: Length) -> Triple:
        """The smallest, the usual and the largest of ``length``.

        Raises:
            UsageError: one of them is no length of a tensor.
        """
        parts = [self.triples[name] for name in length.names]
        ends = [length.at(dict(zip(length.names, sizes, strict=True))) for sizes in zip(*parts, strict=True)]
        if len(parts) > 1 and len(parts) <= _MOST_CORNERS:
            corners = itertools.product(*((part[0], part[2]) for part in parts))
            ends += [length.at(dict(zip(length.names, sizes, strict=True))) for sizes in corners]
        found = [end for end in ends if end is not None]
        least = 0 if len(parts) > 1 and min(found, default=-1) < 0 <= (ends[1] or 0) else min(found, default=-1)
        if len(found) < len(ends) or not 0 <= least <= max(found) <= LARGEST_DIM:
            raise UsageError(
                "a dim of the model has no length that a tensor can have",
                where=f"dim {length.text[:200]}",
                got=f"less than 0, more than {LARGEST_DIM}, or no number, at {self._spell(length)}"[:400],
                need=f"0 to {LARGEST_DIM} in every dim",
                do="give other lengths with --shape, or correct the dims' names in the model",
            )
        return least, ends[1] or 0, max(found)

    def _spell(self, length: Length, which: int | None = None) -> str:
        return ", ".join(
            f"{name} = {','.join(map(str, self.triples[name])) if which is None else self.triples[name][which]}"
            for name in length.names
        )

    # --- what is given ------------------------------------------------------------------------------------------------

    def _read(self, graph_input: GraphInput, range_: ShapeRange) -> list[_Fact]:
        """Writes down what a shape says of names that stand alone; what it says of expressions."""
        triples = list(zip(range_.smallest, range_.usual, range_.largest, strict=True))
        need = lengths.spell_dims(graph_input)
        if len(triples) != len(graph_input.dims):
            raise contradiction(range_, f"rank {len(graph_input.dims)}: {need}")
        facts = []
        for dim, length, triple in zip(graph_input.dims, lengths.of(graph_input), triples, strict=True):
            if length is None and triple != (dim, dim, dim):
                raise contradiction(range_, f"{dim} where the model fixes it: {need}")
            if length is not None and not length.is_name:
                facts.append(_Fact(graph_input, range_, length, triple))
            elif length is not None:
                if self.triples.setdefault(length.text, triple) != triple:
                    said, by = ",".join(map(str, self.triples[length.text])), self._by.get(length.text, range_.name)
                    one = "another dim of it" if by == range_.name else f"--shape {by}"
                    raise contradiction(range_, f"{length.text} = {said}, as {one} says")
                self._by.setdefault(length.text, range_.name)
                known = self._limits.get(length.text)
                if known and not lengths.lie_within(known, triple[0], triple[2]):
                    raise outside(graph_input, range_, length.text, known)
        return facts

    def _solve(self, facts: Sequence[_Fact]) -> None:
        """Writes down what the sizes of expressions say of names that nothing has settled."""
        left = [fact for fact in facts if self._unsettled(fact)]
        while left:
            fact = next((f for f in left if len(self._unsettled(f)) == 1), None)
            if fact is None:
                fact = next((f for f in left if self._are_its_own(f)), None)
                if fact is None:
                    return  # the defaults of the other dims decide
                found = self._split(fact)
            else:
                (name,) = self._unsettled(fact)
                found = {name: self._solved(fact, name)}
            self.triples |= found
            self._by |= dict.fromkeys(found, fact.range_.name)
            left = [fact for fact in left if self._unsettled(fact)]

    def _unsettled(self, fact: _Fact) -> list[str]:
        return [name for name in fact.length.names if name not in self.triples]

    def _are_its_own(self, fact: _Fact) -> bool:
        """Whether no other dim has a name of this one that is not settled."""
        names = set(self._unsettled(fact))
        return not any(names & set(length.names) for length in self._every if length.text != fact.length.text)

    def _solved(self, fact: _Fact, name: str) -> Triple:
        others = [other for other in fact.length.names if other != name]
        sizes = [{other: self.triples[other][i] for other in others} for i in range(3)]
        found = [fact.length.solutions(name, *at) for at in zip(fact.triple, sizes, strict=True)]
        known = self._limits.get(name)
        if found[1] is None or (not others and None in found):
            at = f", where {', '.join(f'{other} = {size}' for other, size in sizes[1].items())}" if others else ""
            need = f"a whole number for {name} in {fact.length.text}{at}: {lengths.spell_dims(fact.graph_input)}"
            raise fact.contradiction(need)
        kept = [lengths.narrowed(span, known) if span else None for span in found]
        if known and (kept[1] is None or (not others and None in kept)):
            raise outside(fact.graph_input, fact.range_, name, known)
        spans = [span for span in kept if span]
        return min(low for low, _ in spans), (kept[1] or spans[0])[0], max(high for _, high in spans)

    def _split(self, fact: _Fact) -> dict[str, Triple]:
        """Lengths for the unsettled names of an expression, such that each is as large as can be, a past last."""
        names = sorted(self._unsettled(fact), key=lambda name: (name.startswith("past"), name))
        found = []
        for i, size in enumerate(fact.triple):
            settled = {name: self.triples[name][i] for name in fact.length.names if name not in names}
            sizes = settled | {name: self._least(name) for name in names}
            for name in names:
                span = fact.length.solutions(name, size, sizes)
                if span and span[0] > sizes[name]:
                    sizes[name] = min(span[0], self._limits.get(name, (0, LARGEST_DIM))[1])
            if fact.length.at(sizes) != size:
                known = ", ".join(f"{n} in {dim_ranges.spell(self._limits[n])}" for n in names if n in self._limits)
                need = f"a size that {', '.join(names)} make in {fact.length.text}{f', {known}' if known else ''}"
                raise fact.contradiction(f"{need}: {lengths.spell_dims(fact.graph_input)}")
            found.append(sizes)
        every = {name: sorted(sizes[name] for sizes in found) for name in names}
        return {name: (numbers[0], found[1][name], numbers[2]) for name, numbers in every.items()}

    def _least(self, name: str) -> int:
        low = self._limits.get(name, (1, 1))[0]
        return 0 if low == 1 and name.startswith("past") else low

    def _require(self, fact: _Fact) -> None:
        """Refuses a size of an expression that its names do not give.

        Of a sum the smallest and largest are bounds, each of its own: the longest total may be less than both longest
        parts, but not more.
        """
        triple = low, usual, high = self.triple(fact.length)
        settlers = dict.fromkeys(self._by[name] for name in fact.length.names if name in self._by)
        by = f", as --shape {' and '.join(settlers)} says" if settlers else ""
        if len(fact.length.names) == 1 and fact.triple != triple:
            said = ",".join(map(str, triple))
            raise fact.contradiction(f"{fact.length.text} = {said}, since {self._spell(fact.length)}{by}")
        if fact.triple[1] != usual:
            since = self._spell(fact.length, 1)
            raise fact.contradiction(f"{fact.length.text} = {usual} as the usual length, since {since}{by}")
        if fact.triple[0] < low or fact.triple[2] > high:
            since = self._spell(fact.length)
            raise fact.contradiction(f"{fact.length.text} in {low}..{high}, since {since}{by}")

    # --- what is not --------------------------------------------------------------------------------------------------

    def _defaults(self, inputs: Sequence[GraphInput]) -> dict[str, Triple]:
        """What each name gets that is not settled, within the limits.

        One that is only ever a part of a first axis is a batch too; the length of a past may be 0.
        """
        chosen: dict[str, Triple] = {}
        dims = [(axis, length) for i in inputs for axis, length in enumerate(lengths.of(i)) if length]
        for axis, length in sorted(dims, key=lambda found: not found[1].is_name):
            for part in length.names:
                if part not in self.triples:
                    usual = _DEFAULT_BATCH if axis == 0 else _DEFAULT_PAST if part[:4] == "past" else _DEFAULT_LENGTH
                    chosen.setdefault(part, _clamped(usual, self._limits.get(part)))
        for _, length in dims:
            if len(length.names) == 1 and not length.is_name and (name := length.names[0]) in chosen:
                chosen[name] = _raised(length, name, chosen[name], self._limits.get(name, (0, LARGEST_DIM))[1])
        return chosen


def _clamped(triple: Triple, limits: tuple[int, int] | None) -> Triple:
    if limits is None:
        return triple
    low = limits[0] if limits[0] > 1 else 0  # the least that PyTorch traces is 1, and says nothing of an empty past
    smallest, usual, largest = (min(max(size, low), limits[1]) for size in triple)
    return smallest, usual, largest


def _raised(length: Length, name: str, triple: Triple, most: int) -> Triple:
    """``triple`` from the first number on that makes the length 1 and more: 4 of ``n - 3``."""
    low = next((n for n in range(triple[0], min(triple[2], most) + 1) if (length.at({name: n}) or 0) > 0), triple[0])
    return low, max(low, triple[1]), triple[2]


def contradiction(range_: ShapeRange, need: str) -> UsageError:
    """The error of a shape that does not fit the model, or another shape."""
    return UsageError(
        f"the shape of {range_.name} contradicts the model",
        where="--shape",
        got=str(range_),
        need=need,
        do="give dims that agree; a symbol means the same length everywhere, and one that no --shape names its default",
    )


def outside(graph_input: GraphInput, range_: ShapeRange, dim: str, known: tuple[int, int]) -> UsageError:
    """The error of a shape in which ``dim`` leaves the range ``known``."""
    return UsageError(
        f"the shape of {range_.name} leaves the range in which the model works",
        where=f"--shape, dim {dim}",
        got=str(range_),
        need=f"{dim} in {dim_ranges.spell(known)}, as the model was exported for: {lengths.spell_dims(graph_input)}",
        do=f"keep {dim} in that range, or export the model again for another one",
    )
