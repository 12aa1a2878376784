# SPDX-License-Identifier: Apache-2.0
"""Named tensors in a file: NPZ, safetensors or JSON. Read by content, written by suffix.

JSON is ``{"name": nested lists}`` or ``{"name": {"dtype", "shape", "data"}}``; ``data`` may be nested or flat. A number
that JSON lacks is the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from flash_export import regular_file
from flash_export.errors import UsageError
from flash_trt.output import write_atomically

Tensors = dict[str, np.ndarray]

_SUFFIXES = (".npz", ".safetensors", ".json")
_SAFETENSORS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


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
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        if data[8:9] == b"{":
            return {name: _from_safetensors(tensor) for name, tensor in safetensors.deserialize(data)}
        return _from_json(data, dtypes or {})
    # A broken file makes each reader raise what it likes; UnicodeDecodeError and JSONDecodeError are ValueErrors.
    except (OSError, ValueError, TypeError, KeyError, EOFError, OverflowError, RecursionError) as error:
        raise _unreadable(path, error) from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, safetensors.SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        "the tensors cannot be read",
        where=str(path),
        got=" ".join(str(error).split())[:200] or type(error).__name__,
        need="NPZ with plain arrays, safetensors, or JSON: {name: nested lists}",
        do="write it with numpy.savez(FILE, **{name: array})",
    )


def _from_safetensors(tensor: Mapping[str, Any]) -> np.ndarray:
    dtype = _SAFETENSORS[tensor["dtype"]]
    return np.frombuffer(bytes(tensor["data"]), dtype).reshape(tensor["shape"])


def _from_json(data: bytes, dtypes: Mapping[str, np.dtype]) -> Tensors:
    document = json.loads(data.decode())
    if not isinstance(document, dict):
        raise TypeError(f"a {type(document).__name__} where an object {{name: tensor}} is needed")
    tensors = {}
    for name, value in document.items():
        if isinstance(value, dict):
            dtype = _dtype(value["dtype"])
            tensors[name] = _array(value["data"], dtype).reshape(value["shape"])
        else:
            tensors[name] = _array(value, dtypes.get(name))
    return tensors


def _array(value: object, dtype: np.dtype | None) -> np.ndarray:
    if dtype is None or dtype.kind in "biu":
        return np.array(value, dtype)
    return np.array(value, np.float64).astype(dtype)  # "NaN" becomes a number in float64 alone


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


# --- writing ----------------------------------------------------------------------------------------------------------


def check_suffix(path: Path) -> None:
    """Refuses a file name whose suffix names no kind of file that ``write`` knows.

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


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes ``tensors`` in the kind that the suffix names; bfloat16 becomes float32 in an NPZ, which has none.

    Raises:
        UsageError: another suffix.
        MissingHere: the disk is full.
    """
    check_suffix(path)
    kind = path.suffix.lower()
    if kind == ".json":
        data = json.dumps({name: _as_json(array) for name, array in tensors.items()}).encode() + b"\n"
    elif kind == ".safetensors":
        data = safetensors.numpy.save({name: np.array(array, order="C") for name, array in tensors.items()})
    else:
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {name: _without_bfloat16(array) for name, array in tensors.items()}
        np.savez(buffer, **arrays)
        data = buffer.getvalue()
    write_atomically(path, data)


def _without_bfloat16(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def _as_json(array: np.ndarray) -> dict[str, Any]:
    plain = array if array.dtype.kind in "biu" else array.astype(np.float64)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": _spell(plain.tolist())}


def _spell(value: Any) -> Any:
    if isinstance(value, list):
        return [_spell(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
