# SPDX-License-Identifier: Apache-2.0
"""The nodes that bring a value from the axes that it has to the axes that a layout asks for."""

from __future__ import annotations

import dataclasses

from flash_export.layout import Axes, Axis, Source, leaves, size_of


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One node to emit: ``Squeeze`` or ``Unsqueeze`` (axes), ``Transpose`` (perm), ``Reshape`` (target with 0).

    ``ComputedReshape`` is a Reshape whose target is computed at run time: each of ``lengths`` is a number times those
    that are had from ``Source``s.
    """

    op: str
    numbers: tuple[int, ...]
    lengths: tuple[tuple[int, tuple[Source, ...]], ...] = ()


MOVE_COST = {
    "Identity": 0.0,
    "Squeeze": 0.01,
    "Unsqueeze": 0.01,
    "Reshape": 0.1,
    "ComputedReshape": 0.5,
    "Transpose": 1.0,
}
"""What a layout node costs a runtime, relative to a transpose, which moves the whole tensor."""


def arrange(axes: Axes, wanted: Axes) -> list[Move] | None:
    """The nodes that bring a value with ``axes`` into ``wanted``; None when it takes a length that cannot be had."""
    have = [leaves(a) for a in axes]
    want = [leaves(a) for a in wanted]
    if have == want:
        return []
    moves: list[Move] = []
    split = _split_to(have, want)
    if split is None:
        return None
    have, split_moves = split
    moves.extend(split_moves)
    full = [a for a in have if a]
    flat = [a for a in want if a]
    merged = _merge_order(full, flat)
    if merged is None:
        return None
    order, groups = merged
    empty = tuple(i for i, a in enumerate(have) if not a)
    if order == sorted(order) and have != want and [a for a in have if a] == flat:
        return moves + _rank_moves(have, want)
    if empty:
        moves.append(Move("Squeeze", empty))
    if order != sorted(order):
        moves.append(Move("Transpose", tuple(order)))
    ordered = [full[i] for i in order]
    return _finish(moves, ordered, groups, want)


def _finish(moves: list[Move], ordered: list[Axis], groups: list[list[int]], want: list[Axis]) -> list[Move] | None:
    if len(ordered) == len(groups):
        return moves + _rank_moves(ordered, want)
    # Merging: one Reshape; 0 copies a dim of the same position, everything else must be a number.
    numbers: list[int] = []
    full = iter(groups)
    for axis in want:
        group = next(full) if axis else []
        if len(group) == 1 and group[0] == len(numbers):
            numbers.append(0)
            continue
        size = size_of(axis).static
        numbers.append(-1 if size is None else size)
    if numbers.count(-1) <= 1:
        return [*moves, Move("Reshape", tuple(numbers))]
    computed = _computed(want)
    return None if computed is None else [*moves, computed]


def _computed(axes: list[Axis]) -> Move | None:
    """The Reshape to ``axes``; None where a length of one is not to be had."""
    lengths = []
    for axis in axes:
        dynamic = [atom for atom in axis if atom.size.static is None]
        sources = tuple(atom.source for atom in dynamic if atom.source is not None)
        if len(dynamic) != len(sources):
            return None
        known = size_of(atom for atom in axis if atom.size.static is not None).static
        lengths.append((1 if known is None else known, sources))
    return Move("ComputedReshape", tuple(-1 if sources else number for number, sources in lengths), tuple(lengths))


def _rank_moves(have: list[Axis], want: list[Axis]) -> list[Move]:
    """Squeeze and Unsqueeze that turn one placement of length-1 axes into another."""
    if have == want:
        return []
    moves = []
    empty = tuple(i for i, a in enumerate(have) if not a)
    if empty:
        moves.append(Move("Squeeze", empty))
    new = tuple(i for i, a in enumerate(want) if not a)
    if new:
        moves.append(Move("Unsqueeze", new))
    return moves


def _split_to(have: list[Axis], want: list[Axis]) -> tuple[list[Axis], list[Move]] | None:
    """Splits axes of ``have`` that hold several axes of ``want``; the Reshape may copy dims but not compute them."""
    sets = [{id(x) for x in w} for w in want]
    parts: list[list[Axis]] = []
    for axis in have:
        pieces: list[Axis] = []
        for atom in axis:
            home = next((i for i, s in enumerate(sets) if id(atom) in s), None)
            if home is None:
                return None
            if pieces and id(pieces[-1][0]) in sets[home]:
                pieces[-1].append(atom)
            else:
                pieces.append([atom])
        parts.append(pieces or [axis])
    result = [piece for pieces in parts for piece in pieces]
    if len(result) == len(have):
        return result, []
    numbers: list[int] = []
    aligned: list[int] = []
    new: list[int] = []
    for index, pieces in enumerate(parts):
        sizes = [size_of(piece).static or -1 for piece in pieces]
        new.extend(range(len(numbers) + 1, len(numbers) + len(pieces)))
        aligned.extend([0] if len(pieces) == 1 else sizes)
        numbers.extend([0] if len(pieces) == 1 and len(numbers) == index else sizes)
    if numbers.count(-1) <= 1:
        return result, [Move("Reshape", tuple(numbers))]
    if aligned.count(-1) > 1:
        computed = _computed(result)
        return None if computed is None else (result, [computed])
    # Axes of length 1 behind what is split keep the later ones at their place, where 0 copies them.
    return result, [Move("Unsqueeze", tuple(new)), Move("Reshape", tuple(aligned))]


def _merge_order(full: list[Axis], flat: list[Axis]) -> tuple[list[int], list[list[int]]] | None:
    """The order of the non-empty axes and, for every wanted axis, the positions (in that order) that it joins."""
    order: list[int] = []
    groups: list[list[int]] = []
    for axis in flat:
        group: list[int] = []
        atoms = list(axis)
        while atoms:
            found = next((i for i, a in enumerate(full) if a == atoms[: len(a)]), None)
            if found is None or found in order:
                return None
            group.append(len(order))
            order.append(found)
            atoms = atoms[len(full[found]) :]
        groups.append(group)
    return (order, groups) if len(order) == len(full) else None
