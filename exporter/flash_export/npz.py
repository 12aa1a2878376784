# SPDX-License-Identifier: Apache-2.0
"""Arrays in an NPZ file, whatever their names, with no code in it and no memory taken on a header's word.

``numpy.savez`` takes names as its keyword arguments, so that an array named ``allow_pickle`` is lost; ``numpy.load``
gives a member that is no array as bytes, and allocates what a header claims before it reads.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

LONGEST_NAME = 2**16 - 100
"""Bytes of a name: a zip archive counts those of a member's in 16 bits."""

_SUFFIX = ".npy"


class Broken(ValueError):
    """The bytes are no NPZ of plain arrays; the message says why."""


def loads(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of an NPZ file's bytes, writable and in C order.

    Raises:
        Broken: as said; an array of Python objects is no plain one.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                if not member.filename.endswith(_SUFFIX):
                    raise Broken(f"its member {member.filename!r} is no array: its name does not end in {_SUFFIX}")
                name = member.filename.removesuffix(_SUFFIX)
                if name in arrays:
                    raise Broken(f"two arrays are named {name!r}")
                arrays[name] = _array(name, archive.read(member))
    except (Broken, MemoryError):
        raise
    except Exception as error:  # zipfile passes on whatever each way of compression raises at corrupt data
        raise Broken(f"{type(error).__name__}: {error}") from error
    return arrays


def _array(name: str, data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    try:
        shape, fortran, dtype = _header(stream)
    except Exception as error:  # the header is a literal of Python: its parser even runs out of memory at deep ones
        raise Broken(f"array {name!r} has no header that NumPy reads ({type(error).__name__})") from error
    if dtype.hasobject:
        raise Broken(f"array {name!r} holds Python objects, and pickles are not read")
    start = stream.tell()
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > len(data) - start:
        raise Broken(f"array {name!r} claims shape {list(shape)} of {dtype} and has {len(data) - start} bytes")
    try:
        return np.ndarray(shape, dtype, data, start, order="F" if fortran else "C").copy()
    except ValueError as error:  # more axes than NumPy has
        raise Broken(f"array {name!r}: {error}") from error


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise Broken(f"version {version} is for arrays of records")


def is_name(name: str) -> bool:
    """Whether ``dumps`` keeps the name: a zip archive cuts one at a NUL."""
    return "\0" not in name and len(name.encode()) <= LONGEST_NAME


def dumps(arrays: Mapping[str, np.ndarray]) -> bytes:
    """``arrays`` as the bytes of an NPZ file that ``numpy.load`` reads.

    Raises:
        ValueError: an array of Python objects, or a name that ``is_name`` refuses.
    """
    if any(not is_name(name) for name in arrays):
        raise ValueError("a zip archive has no member of this name")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            with archive.open(name + _SUFFIX, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return buffer.getvalue()
