# SPDX-License-Identifier: Apache-2.0
"""Named tensors in a file: NPZ, safetensors or JSON. Read by content, written by suffix.

JSON is ``{"name": nested lists}`` or ``{"name": {"dtype", "shape", "data"}}``; ``data`` may be nested or flat. A number
that JSON lacks is the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from flash_export import npz, regular_file
from flash_export.errors import UsageError
from flash_trt.output import write_atomically

Tensors = dict[str, np.ndarray]

_SUFFIXES = (".npz", ".safetensors", ".json")
_METADATA = "__metadata__"
_ONE_ARRAY = b"\x93NUMPY"
_SAFETENSORS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_DTYPES: dict[str, np.dtype] = {np.dtype(kind).name: np.dtype(kind) for kind in _SAFETENSORS.values()}
"""What all three kinds of file hold, by name."""


def read(path: Path, dtypes: Mapping[str, np.dtype] | None = None) -> Tensors:
    """The tensors in ``path``.

    Args:
        dtypes: name -> dtype for what JSON gives without one.

    Raises:
        UsageError: no such file, none of the three kinds, or a broken one. Pickled arrays are refused.
    """
    try:
        regular_file.require(path)
        data = path.read_bytes()
        if data[:2] == b"PK":
            return npz.loads(data)
        # The length of a header, where a JSON file has text: a number far beyond any file's length.
        if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data):
            return {name: _from_safetensors(tensor) for name, tensor in safetensors.deserialize(data)}
        if data.startswith(_ONE_ARRAY):
            raise TypeError("one array without a name, an .npy file")
        return _from_json(data, dtypes or {})
    # A broken file makes each reader raise what it likes; UnicodeDecodeError and JSONDecodeError are ValueErrors.
    except (OSError, ValueError, TypeError, KeyError, EOFError, OverflowError, RecursionError) as error:
        raise _unreadable(path, error) from error
    except safetensors.SafetensorError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        "the tensors cannot be read",
        where=str(path),
        got=" ".join(str(error).split())[:200] or type(error).__name__,
        need="NPZ with plain arrays, safetensors, or JSON: {name: nested lists}",
        do="correct the path"
        if isinstance(error, FileNotFoundError)
        else "write it with numpy.savez(FILE, **{name: array})",
    )


def _from_safetensors(tensor: Mapping[str, Any]) -> np.ndarray:
    dtype = _SAFETENSORS[tensor["dtype"]]
    return np.frombuffer(bytes(tensor["data"]), dtype).reshape(tensor["shape"])


def _from_json(data: bytes, dtypes: Mapping[str, np.dtype]) -> Tensors:
    document = json.loads(data.decode(), object_pairs_hook=_object)
    if not isinstance(document, dict):
        raise TypeError(f"a {type(document).__name__} where an object {{name: tensor}} is needed")
    tensors = {}
    for name, value in document.items():
        if isinstance(value, dict):
            if missing := {"dtype", "shape", "data"} - value.keys():
                raise TypeError(f"{name!r} has no {' and no '.join(sorted(missing))}")
            array = _array(name, value["data"], _dtype(value["dtype"]), named=True)
            tensors[name] = array.reshape(_shape(name, value["shape"]))
        else:
            tensors[name] = _array(name, value, dtypes.get(name))
    return tensors


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object of ``pairs``; Python's own reader would take the last of two with one name."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise TypeError(f"two values are named {next(name for name in names if names.count(name) > 1)!r}")
    return made


def _array(name: str, value: object, dtype: np.dtype | None, *, named: bool = False) -> np.ndarray:
    """``value`` in ``dtype``; in float64 where that would make numbers infinite, unless the file names the type."""
    if dtype is not None and dtype.kind not in "biu":
        wide = np.array(value, np.float64)  # "NaN" becomes a number in float64 alone
        with np.errstate(over="ignore"):
            narrow = wide.astype(dtype)
        if not (np.isinf(narrow) & np.isfinite(wide)).any():
            return narrow
        if named:
            raise TypeError(f"{name!r} holds numbers beyond {dtype}")
        return wide
    array = np.array(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name!r} holds more than numbers, or larger ones than any type has")
    if dtype is None:
        return array
    with np.errstate(invalid="ignore"):  # NaN to an integer, which the next line refuses
        typed = array.astype(dtype)
    if not np.array_equal(typed, array):
        raise TypeError(f"{name!r} holds numbers that are none of {dtype}")
    return typed


def _shape(name: str, shape: object) -> list[int]:
    """NumPy would take one size for a row, and work out one that is -1."""
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise TypeError(f"the shape of {name!r} is {shape!r}, and no list of sizes of 0 or more"[:200])
    return shape


def _dtype(name: object) -> np.dtype:
    if not isinstance(name, str) or name not in _DTYPES:  # NumPy would take a whole language of its own here
        raise TypeError(f"dtype {name!r} is none of {', '.join(_DTYPES)}")
    return _DTYPES[name]


# --- writing ----------------------------------------------------------------------------------------------------------


def check(path: Path, dtypes: Mapping[str, np.dtype | None] | None = None) -> None:
    """Refuses, before anything is computed, what ``write`` would refuse after it.

    A suffix that names no kind of file that is known, and names and types of tensors that the kind cannot hold; a type
    of None is not known yet.

    Raises:
        UsageError: as said.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(
            "the suffix of the output names no kind of tensor file",
            where=str(path),
            got=path.suffix or "no suffix",
            need=f"one of {', '.join(_SUFFIXES)}",
            do="name the file accordingly",
        )
    names = list(dtypes or {})
    if path.suffix.lower() == ".safetensors" and _METADATA in names:
        raise UsageError(
            "safetensors has no tensor of this name",
            where=str(path),
            got=f"a tensor named {_METADATA}",
            need="another name: the format keeps this one for itself",
            do="write an .npz or a .json",
        )
    if path.suffix.lower() == ".npz" and (name := next((n for n in names if not npz.is_name(n)), None)) is not None:
        raise UsageError(
            "NPZ has no array of this name",
            where=str(path),
            got=f"a tensor named {name[:40]!r}, {len(name)} characters",
            need=f"a name without NUL, of at most {npz.LONGEST_NAME} bytes in UTF-8: an NPZ is a zip archive",
            do="write a .safetensors or a .json",
        )
    for name, dtype in (dtypes or {}).items():
        if dtype is not None and dtype.newbyteorder("=") not in _DTYPES.values():
            raise UsageError(
                "a tensor's type has no place in a tensor file",
                where=f"tensor {name} for {path}",
                got="text or objects" if dtype.kind in "OSU" else str(dtype),
                need=f"one of {', '.join(_DTYPES)}",
                do="take that output out of the model, or cast it to one of these types there",
            )


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes ``tensors`` in the kind that the suffix names; an NPZ has no bfloat16 or float8: they become float32.

    Raises:
        UsageError: another suffix, a name that the kind of file reserves, or a tensor that holds no numbers.
        MissingHere: the disk is full.
    """
    check(path, {name: array.dtype for name, array in tensors.items()})
    kind = path.suffix.lower()
    if kind == ".json":
        data = json.dumps({name: _as_json(array) for name, array in tensors.items()}).encode() + b"\n"
    elif kind == ".safetensors":
        data = safetensors.numpy.save({name: np.array(array, order="C") for name, array in tensors.items()})
    else:
        data = npz.dumps({name: _in_numpy(array) for name, array in tensors.items()})
    write_atomically(path, data)


def _in_numpy(array: np.ndarray) -> np.ndarray:
    """``array`` in a type of NumPy's own."""
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _as_json(array: np.ndarray) -> dict[str, Any]:
    plain = array if array.dtype.kind in "biu" else array.astype(np.float64)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": _spell(plain.tolist())}


def _spell(value: Any) -> Any:
    if isinstance(value, list):
        return [_spell(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
