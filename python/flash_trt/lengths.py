# SPDX-License-Identifier: Apache-2.0
"""What the text of a dim says of its length: ``2*n - 1`` of ``n``, read as it is when inputs are drawn.

There is one such reader, ``flash_export.dim_texts``: a size settled under another name than it draws by is lost.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Mapping

from flash_export import dim_texts
from flash_trt.onnx_file import GraphInput

LARGEST_DIM = 2**31 - 1
"""TensorRT counts a tensor's dims in 32 bits."""

_TRIED_ONE_BY_ONE = 1024
"""Numbers that are tried where a length neither grows nor shrinks evenly, as that of ``n*(8 - n)``."""

_LONGEST_TRIED = 80
"""Characters of a dim for which that is quick; nobody writes longer ones by hand."""


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """The length of a dynamic dim, computed from those of ``names``, which are sorted."""

    text: str
    names: tuple[str, ...]

    @property
    def is_name(self) -> bool:
        """Whether the dim is a name, and no expression of names; of what cannot be read its text is the name."""
        return self.names == (self.text,)

    def at(self, sizes: Mapping[str, int]) -> int | None:
        """The length at ``sizes`` of the names; None where it has none there, as ``64//n`` has none at 0."""
        if self.is_name:
            return sizes.get(self.text)
        try:
            return dim_texts.length_at(self.text, sizes)
        except KeyError:
            return None

    def solutions(self, name: str, size: int, sizes: Mapping[str, int]) -> tuple[int, int] | None:
        """The smallest and the largest number for ``name`` that make the length ``size``; None where none does.

        Args:
            name: one of ``names``.
            size: the length.
            sizes: those of all other names.
        """

        @functools.cache
        def at(number: int) -> int | None:
            return self.at({**sizes, name: number})

        least = 0 if at(0) is not None else 1
        first, last = at(least), at(LARGEST_DIM)
        if first is not None and last is not None:
            sign = 1 if first <= last else -1
            low = _first(least, lambda number: _passes(at(number), size, sign))
            high = _first(least, lambda number: _passes(at(number), size + sign, sign)) - 1
            if low <= high and at(low) == size:
                return low, high
        many = _TRIED_ONE_BY_ONE if len(self.text) <= _LONGEST_TRIED else least
        tried = [number for number in range(least, many) if at(number) == size]
        return (tried[0], tried[0]) if tried else None


def _passes(length: int | None, size: int, sign: int) -> bool:
    return length is not None and length * sign >= size * sign


def _first(least: int, holds: Callable[[int], bool]) -> int:
    """The first number from ``least`` on for which ``holds``, one past the largest dim where it does for none."""
    return least + bisect.bisect_left(range(least, LARGEST_DIM + 1), True, key=holds)


def read(text: str) -> Length:
    """The length that ``text`` spells."""
    return Length(text, tuple(sorted(set(dim_texts.names_in(text)))))


def unnamed(text: str) -> Length:
    """The length of a dim that has no name, or one that is no expression; ``text`` tells people which one it is."""
    return Length(text, (text,))


def of(graph_input: GraphInput) -> list[Length | None]:
    """The length along each axis; None where it is a number."""
    return [
        None if isinstance(dim, int) else read(dim) if dim else unnamed(f"{graph_input.name}[{axis}]")
        for axis, dim in enumerate(graph_input.dims)
    ]


def spell_dims(graph_input: GraphInput) -> str:
    """``[batch, 12, ?]``."""
    return "[" + ", ".join(str(dim) if dim != "" else "?" for dim in graph_input.dims) + "]"


def lie_within(known: tuple[int, int], *lengths: int) -> bool:
    """A length of 0 is taken where the smallest is 1: that 1 is the least that PyTorch traces, and says nothing of a
    tensor without elements. Where the model fails on it, the runtime says so.
    """
    return all(known[0] <= length <= known[1] or (length == 0 and known[0] == 1) for length in lengths)


def narrowed(span: tuple[int, int], known: tuple[int, int] | None) -> tuple[int, int] | None:
    """The part of ``span`` that lies within ``known``; None where none does."""
    if known is None:
        return span
    low, high = max(span[0], known[0] if known[0] != 1 else 0), min(span[1], known[1])
    return (low, high) if low <= high else None
