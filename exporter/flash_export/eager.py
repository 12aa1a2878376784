# SPDX-License-Identifier: Apache-2.0
"""Eager PyTorch as the check sees it: functions of NumPy inputs by graph input name, giving outputs in graph order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

Reference = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True)
class Eager:
    """A ``Reference`` that also runs ``in_float64``, which tells how much the model's own float32 rounds.

    ``in_float64`` raises whatever the user's module raises in a type that it may not have been written for.
    """

    run: Reference
    in_float64: Reference

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return self.run(inputs)
