# SPDX-License-Identifier: Apache-2.0
"""``--input NAME:DTYPE:DIM,DIM,...`` as the user writes it, into ``InputSpec``.

A dim is a number, a name (a dynamic dimension) or a name with its range: ``ids:int64:batch,seq=1..512``. The same
name in two inputs means the same dimension; its range needs to be written once. ``n=4..4`` is the number 4, and
``x:float32:`` a scalar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from flash_export.errors import UsageError
from flash_export.options import Dim, InputSpec

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
"""The element types an input can have, in NumPy's and PyTorch's spelling."""

ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}

MAX_RANK = 8
CHECK_INPUTS = "check names, types and sizes of --input"
ALL_INPUTS = "give --input NAME:TYPE:DIMS once for every input that forward needs, in place of the usual ones"
"""What to do where forward takes no inputs like those: where they were given, and where they were the usual ones."""

MAX_DIM = 2**31 - 1

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_DIM_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXAMPLE = "--input input_ids:int64:batch,seq=1..512"


def parse_inputs(texts: Iterable[str]) -> tuple[InputSpec, ...]:
    """Reads every ``--input`` of a command line, in order.

    A range given to a dimension once holds wherever its name stands.

    Raises:
        UsageError: a text is not of the form, names an unknown type, repeats an input, or gives a name two ranges.
    """
    specs = [_parse_input(text) for text in texts]
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise _wrong("an input is given twice", spec.name, f"{spec.name!r} a second time", "each input once")
        seen.add(spec.name)
    ranges = _ranges(specs)
    return tuple(
        InputSpec(s.name, s.dtype, tuple(ranges[d.name] if isinstance(d, Dim) else d for d in s.dims)) for s in specs
    )


def _parse_input(text: str) -> InputSpec:
    parts = text.split(":")
    if len(parts) != 3 or not _NAME.fullmatch(parts[0]):
        raise _wrong("an input cannot be read", text, f"{text!r}", "NAME:DTYPE:DIM,DIM,...")
    name, dtype, dims = parts
    dtype = ALIASES.get(dtype, dtype)
    if dtype not in DTYPES:
        raise _wrong("an input has an unknown element type", text, f"{parts[1]!r}", "one of " + ", ".join(DTYPES))
    fields = dims.split(",") if dims else []
    if len(fields) > MAX_RANK:
        raise _wrong("an input has too many dimensions", text, f"{len(fields)}", f"at most {MAX_RANK}")
    return InputSpec(name, dtype, tuple(_parse_dim(field.strip(), text) for field in fields))


def _parse_dim(field: str, text: str) -> int | Dim:
    if re.fullmatch(r"[0-9]+", field):
        size = int(field)
        if size > MAX_DIM:
            raise _wrong("a dimension is too large", text, field, f"at most {MAX_DIM}")
        return size
    name, equals, limits = field.partition("=")
    if not _DIM_NAME.fullmatch(name):
        raise _wrong("a dimension cannot be read", text, f"{field!r}", "a number, a name, or name=LOW..HIGH")
    if not equals:
        return Dim(name)
    match = re.fullmatch(r"([0-9]+)\.\.([0-9]+)?", limits)
    if match is None:
        raise _wrong("a range cannot be read", text, f"{limits!r}", "LOW..HIGH, or LOW.. for no upper end")
    # PyTorch traces 1 at the least, and with it nothing at all: an empty past is inside of both.
    low, high = max(int(match[1]), 1), int(match[2]) if match[2] else None
    if low > MAX_DIM or (high is not None and (high < low or high > MAX_DIM)):
        raise _wrong("a range is empty or too large", text, f"{limits!r}", f"1 <= LOW <= HIGH <= {MAX_DIM}")
    return low if low == high else Dim(name, low, high)


def _ranges(specs: list[InputSpec]) -> dict[str, Dim]:
    """Dimension name -> the Dim with its range, the one place that gives a range winning over those that give none."""
    found: dict[str, Dim] = {}
    for spec in specs:
        for dim in spec.dims:
            if not isinstance(dim, Dim):
                continue
            known = found.get(dim.name, dim)
            if Dim(dim.name) not in (known, dim) and known != dim:
                raise _wrong("a dimension has two ranges", dim.name, f"{known} and {dim}", "one range for one name")
            found[dim.name] = dim if known == Dim(dim.name) else known
    return found


def _wrong(what: str, where: str, got: str, need: str) -> UsageError:
    return UsageError(what, where=f"--input {where}", got=got, need=need, do=f"write it as in {_EXAMPLE}")
