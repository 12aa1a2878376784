# SPDX-License-Identifier: Apache-2.0
"""Inputs that the user gives, in the types that a model takes."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from flash_export import twin
from flash_export.errors import UsageError
from flash_export.talk import Talk


def typed(where: str, array: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    """``array`` in ``dtype``, which None leaves as it is: floats are rounded, integers must stay the same numbers.

    A float beyond the type becomes infinite, of which ``warn`` tells.

    Raises:
        UsageError: another kind of numbers, or integers that the type does not hold; names ``where``.
    """
    if dtype is None or array.dtype == dtype:
        return array
    if twin.is_float(array.dtype) and twin.is_float(dtype):
        with np.errstate(over="ignore"):
            return twin.convert_array(array, dtype)
    if array.dtype.kind in "biu" and dtype.kind in "biu" and np.array_equal(array.astype(dtype), array):
        return array.astype(dtype)
    raise UsageError(
        "an input has another type than the model takes",
        where=where,
        got=str(array.dtype),
        need=str(dtype),
        do=f"store it as {dtype}",
    )


def warn(given: Mapping[str, np.ndarray], taken: Mapping[str, np.ndarray], talk: Talk) -> None:
    """Tells of what ``typed`` changed: integers of another type, which no session takes; floats beyond their type."""
    for name, array in taken.items():
        if array.dtype.kind in "biu" and given[name].dtype != array.dtype:
            talk.warn(f"input {name} holds {given[name].dtype} where the model takes {array.dtype}: it is converted")
        elif twin.is_float(array.dtype) and given[name].dtype != array.dtype:
            count = int(np.count_nonzero(~np.isfinite(array) & np.isfinite(given[name])))
            if count:
                numbers = f"{count} number{'' if count == 1 else 's'} beyond {array.dtype}"
                most = float(ml_dtypes.finfo(array.dtype).max)
                talk.warn(
                    f"input {name} holds {numbers}, the type that the model takes, ending at {most:.3g}: infinite there"
                )
