# SPDX-License-Identifier: Apache-2.0
"""Random inputs for a whole ONNX model that respect what each input is for.

Integers stay below the size of the table they index, masks are realistic padding, lengths end at a key that is there,
boxes have their corners in order, floats are standard normal (boxes: 0 to 1). The same path, sizes, seed and kind
always give the same numbers.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeGuard

import numpy as np
import onnx_ir as ir

from flash_export.dim_texts import length_at, names_in
from flash_export.errors import UsageError
from flash_export.input_roles import Role, fed_inputs, holds_boxes, read_roles
from flash_export.length_roles import draw_lengths

Padding = Literal["mixed", "full", "right", "left", "holes"]
PADDINGS: tuple[Padding, ...] = ("mixed", "full", "holes", "right", "left")
"""Those of a comparison's runs in turn: holes, the only ones that differ along every axis, at its longest setting."""

_MIXED: tuple[Padding, ...] = ("right", "left", "holes", "full")
"""All ones tell the least, so they come last: a batch of one has fewer runs than there are turns."""

_BATCH_SIZES = (3, 1, 2)
_LENGTHS = ((67, 41, 53, 37), (1, 19, 5, 11), (131, 197, 29, 71))
"""Sizes of the 1st, 2nd, ... dim that is no batch, in three settings: odd, unequal, past one tile, 1 among them.

Of two, the first is the longer one and then the shorter one: a mask may ask which.
"""

MOST_NUMBERS = 2**30
"""In one input; a shape that asks for more is a mistake or an attack."""

MOST_AXES = 64
"""NumPy's arrays have no more."""

_NAMES = "BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FLOAT16 BFLOAT16 FLOAT DOUBLE"
_DRAWN = frozenset(ir.DataType[name] for name in _NAMES.split())
"""Types whose arrays ONNX Runtime takes in Python."""


def draw_inputs(
    model: Path | ir.Model, sizes: Mapping[str, int], seed: int = 0, kind: Padding = "mixed", *, spread: float = 1.0
) -> dict[str, np.ndarray]:
    """One value for every graph input that has to be fed, in the input's dtype.

    Args:
        model: an ONNX file, or the same loaded.
        sizes: dynamic dim -> size; names as ``dynamic_dims`` gives them.
        seed: what the numbers depend on, besides names and shapes.
        kind: how masks are filled. ``mixed``: right padding, left padding, holes and all ones take turns from row
            to row, starting with the ``seed``-th; every row keeps at least one 1.
        spread: standard deviation of floats.

    Raises:
        UsageError: an input is no tensor of numbers, or a dim has no size.
    """
    return dict(
        Drawn(ir.load(model, format="protobuf") if isinstance(model, Path) else model, sizes, seed, kind, spread=spread)
    )


class Drawn(Mapping[str, np.ndarray]):
    """What ``draw_inputs`` gives, each array drawn when it is asked for and kept by nobody.

    The past of a large model is hundreds of megabytes at each of the sizes that a check may try.
    """

    def __init__(
        self,
        model: ir.Model,
        sizes: Mapping[str, int],
        seed: int = 0,
        kind: Padding = "mixed",
        *,
        spread: float = 1.0,
        roles: Mapping[str, Role] | None = None,
    ) -> None:
        """As ``draw_inputs``; ``roles`` are those of the model's inputs where they are known.

        Raises:
            UsageError: a dim has no size.
        """
        self._inputs = fed_inputs(model)
        self._shapes = {name: concrete_shape(value, sizes) for name, value in self._inputs.items()}
        self._roles = read_roles(model) if roles is None else roles
        self._sizes, self._seed, self._kind, self._spread = sizes, seed, kind, spread

    def __getitem__(self, name: str) -> np.ndarray:
        value, role = self._inputs[name], self._roles[name]
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        drawn = _draw(rng, value, self._shapes[name], self._sizes, role, self._kind, self._spread, self._seed)
        if holds_boxes(name, drawn.shape):
            drawn = _in_order(rng.random(drawn.shape).astype(drawn.dtype) if drawn.dtype.kind == "f" else drawn)
        return np.asarray(drawn)  # NumPy draws a number, not an array, for an input of rank 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


def _draw(
    rng: np.random.Generator,
    value: ir.Value,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    role: Role,
    kind: Padding,
    spread: float,
    seed: int,
) -> np.ndarray:
    dtype = value.dtype
    if dtype is None or dtype not in _DRAWN or not isinstance(value.type, ir.TensorType):
        raise UsageError(
            "cannot draw random numbers for a graph input",
            where=f"input {value.name}",
            got=f"type {value.type}",
            need="a tensor of truths, of integers of 8 bits and more, or of floats of 16 and more",
            do="let the model take another type and cast it inside, or give the inputs in a file: --values FILE.npz, or"
            " flash-trt run --inputs FILE; flash-export needs none with --no-check",
        )
    if min(shape, default=0) < 0 or math.prod(shape) > MOST_NUMBERS or len(shape) > MOST_AXES:
        raise UsageError(
            "cannot draw random numbers for a graph input",
            where=f"input {value.name}",
            got=f"shape {list(shape)}",
            need=f"sizes of 0 or more, together at most {MOST_NUMBERS:,} numbers, along at most {MOST_AXES} axes",
            do="give smaller sizes, or the inputs in a file: --values FILE.npz, or flash-trt run --inputs FILE;"
            " flash-export needs none with --no-check",
        )
    numpy_dtype = dtype.numpy()
    if role.kind == "mask":
        return draw_mask(rng, shape, kind, turn=seed).astype(numpy_dtype)
    if role.kind == "length":
        lows, highs = zip(*(span.limits(sizes) for span in role.spans), strict=True)
        low = max(0, *lows)
        limits = (low, max(low, min(highs)))
        return draw_lengths(rng, shape, limits, full=kind == "full", turn=seed).astype(numpy_dtype)
    if role.kind == "size":
        return np.ones(shape, numpy_dtype)
    if role.kind == "index":
        return rng.integers(0, role.limit or 1, shape).astype(numpy_dtype)
    if dtype.is_integer():
        high = min(256, np.iinfo(numpy_dtype).max + 1)
        return rng.integers(0, high, shape).astype(numpy_dtype)
    return (spread * rng.standard_normal(shape)).astype(numpy_dtype)


def _in_order(boxes: np.ndarray) -> np.ndarray:
    """``x0, y0, x1, y1`` such that x0 <= x1 and y0 <= y1."""
    return np.sort(boxes.reshape(*boxes.shape[:-1], 2, 2), axis=-2).reshape(boxes.shape)


def draw_mask(
    rng: np.random.Generator, shape: tuple[int, ...], kind: Padding = "mixed", *, turn: int = 0
) -> np.ndarray:
    """A mask of 0 and 1 (bool) of ``shape``: the last axis is the keys, 1 means visible.

    The padding of one row of the first axis is the same in all of its other axes, except for ``holes``. No row
    is all 0 (unless it is empty). A mask of queries or heads, whose last axis has length 1, is drawn along its last
    axis that is longer.
    """
    long = next((axis for axis in reversed(range(1, len(shape))) if shape[axis] > 1), None)
    if shape[-1:] == (1,) and long is not None:
        return np.moveaxis(draw_mask(rng, (*shape[:long], *shape[long + 1 :], shape[long]), kind, turn=turn), -1, long)
    mask = np.ones(shape, bool)
    if not mask.size or not shape:
        return mask
    keys = shape[-1]
    rows = mask.reshape(shape[0] if len(shape) > 1 else 1, -1, keys)
    for i, row in enumerate(rows):
        style = kind if kind != "mixed" else _MIXED[(i + turn) % len(_MIXED)]
        kept = int(rng.integers(1, keys + 1))
        if style == "right":
            row[:, kept:] = False
        elif style == "left":
            row[:, : keys - kept] = False
        elif style == "holes":
            row &= rng.random(row.shape) > 0.25
            row[np.arange(row.shape[0]), rng.integers(0, keys, row.shape[0])] = True
    return mask


def dynamic_dims(model: ir.Model) -> dict[str, bool]:
    """Every dynamic dim that the inputs of ``model`` name -> whether it is a batch (only ever a first axis).

    A dim without a name is called ``INPUT.AXIS``; a sum such as ``past + seq`` counts as its parts.
    """
    found: dict[str, bool] = {}
    for value in fed_inputs(model).values():
        for axis, name in _named_dims(value):
            for part in names_in(name):
                found[part] = found.get(part, True) and axis == 0
    return found


def concrete_shape(value: ir.Value, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a graph input or output once every dynamic dim has its size from ``sizes``.

    Raises:
        UsageError: a dim has no size, or the input's rank is unknown.
    """
    if value.shape is None:
        raise UsageError(
            "the rank of a graph input is unknown",
            where=f"input {value.name}",
            got="no shape",
            need="a shape; its dims may be dynamic",
            do="export the model with shapes, or give the inputs with --values FILE.npz",
        )
    shape = [d if _is_fixed(d) else 0 for d in value.shape]
    for axis, name in _named_dims(value):
        try:
            shape[axis] = sizes[name] if name in sizes else length_at(name, sizes)
        except KeyError as missing:
            raise UsageError(
                "a dynamic dim has no size",
                where=f"input {value.name}, axis {axis}",
                got=f"dim {name}, sizes {dict(sizes)}",
                need=f"a size for {missing.args[0]}",
                do="name every dynamic dim in the sizes",
            ) from None
    return tuple(shape)


def sizes_to_try(
    model: ir.Model, ranges: Mapping[str, tuple[int, int]], example: Mapping[str, np.ndarray] | None = None
) -> list[list[dict[str, int]]]:
    """Three settings of the dynamic dims, odd on purpose and inside ``ranges`` (both ends allowed).

    Lengths differ from each other, so that a swapped query and key axis shows; one setting is past 128, where a
    tile of any kernel ends, and one has the smallest length. A model without dynamic dims has one setting, ``{}``;
    one with a past has a fourth, in which a batch goes on by one step, the only one that some operators take.

    Each setting is a list of choices to take in turn, because exporters give one length several names: every length
    another size, a total that of its past and what is new; then lengths alike that are alike in ``example``; then all
    lengths alike. Then the same an eighth and a 32nd as long, for models that end before (a table of 64, or 7,
    positions). Then all of it with a batch of one, for models whose export runs with nothing else.
    """
    dims = dynamic_dims(model)
    if not dims:
        return [[{}]]
    lengths = [name for name, is_batch in dims.items() if not is_batch]
    shown = sizes_in(model, example or {})
    groupings = (lengths, [str(shown.get(name, name)) for name in lengths], [""] * len(lengths))
    settings: list[list[dict[str, int]]] = []
    for turn, batch in enumerate(_BATCH_SIZES):
        choices: list[dict[str, int]] = []
        for rows, shrink, groups in itertools.product((batch, 1), (1, 8, 32), groupings):
            wanted = dict.fromkeys(dims, rows)
            members = list(dict.fromkeys(groups))
            wanted |= {n: _length(turn, members.index(g)) // shrink | 1 for n, g in zip(lengths, groups, strict=True)}
            sizes = {name: _clamp(size, ranges.get(name)) for name, size in wanted.items()}
            for choice in (_with_totals(sizes, lengths), sizes):
                if choice not in choices:
                    choices.append(choice)
        if choices not in settings:
            settings.append(choices)
    new = [name for name in lengths if "past" not in name and "total" not in name]
    if new and any("past" in name for name in lengths):
        one = {name: _clamp(1, ranges.get(name)) for name in new}
        steps = [choice | one for choice in settings[0]]
        settings.append([c for step in steps for c in (_with_totals(step, lengths), step)])
    return settings


def _with_totals(sizes: dict[str, int], lengths: Iterable[str]) -> dict[str, int]:
    """The same with ``total_sequence_length``, as ONNX Runtime GenAI names it, the sum of its past and what is new."""
    totals = [name for name in lengths if "total" in name]
    parts = [name for name in lengths if "total" not in name]
    if len(parts) != 2 or not any("past" in name for name in parts):
        return sizes
    return sizes | dict.fromkeys(totals, sum(sizes[name] for name in parts))


def _length(turn: int, i: int) -> int:
    """The ``i``-th length of a setting."""
    return _LENGTHS[turn][i % len(_LENGTHS[turn])] + 2 * (i // len(_LENGTHS[turn]))


def sizes_in(model: ir.Model, example: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Dynamic dim of an input -> its size in ``example``; that of ``blocks`` too where there is only ``4*blocks``."""
    inputs = {name: value for name, value in fed_inputs(model).items() if name in example}
    found = {
        dim: example[name].shape[axis]
        for name, value in inputs.items()
        for axis, dim in _named_dims(value)
        if axis < example[name].ndim
    }
    for dim, size in list(found.items()):
        unknown = {part for part in names_in(dim) if part not in found}
        if len(unknown) == 1:
            found |= _solved(dim, unknown.pop(), size, found)
    return found


def _solved(dim: str, name: str, size: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """``name`` -> the number at which ``dim`` is ``size``, where it grows evenly with it."""
    try:
        zero, one = (length_at(dim, {**sizes, name: n}) for n in (0, 1))
    except KeyError:  # it has no size at 0, as 64//n has none
        return {}
    number = (size - zero) // (one - zero) if one != zero else -1
    fits = number >= 0 and length_at(dim, {**sizes, name: number}) == size
    return {name: number} if fits else {}


def _clamp(size: int, allowed: tuple[int, int] | None) -> int:
    return size if allowed is None else max(allowed[0], min(size, allowed[1]))


def _named_dims(value: ir.Value) -> Iterable[tuple[int, str]]:
    for axis, dim in enumerate(value.shape or ()):
        if not _is_fixed(dim):
            yield axis, (None if isinstance(dim, int) else dim.value) or f"{value.name}.{axis}"


def _is_fixed(dim: int | ir.SymbolicDim) -> TypeGuard[int]:
    """A negative number is how PyTorch's and TensorFlow's older exporters, and runtimes, write a dynamic dim."""
    return isinstance(dim, int) and dim >= 0
