# SPDX-License-Identifier: Apache-2.0
"""Which of an engine's optimization profiles runs some inputs: the first that holds their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def first_holding(engine: Any, feeds: Mapping[str, np.ndarray]) -> int:
    """The number of the first profile of ``engine``, an ``ICudaEngine``, that holds the shapes of ``feeds``.

    0 where none does: TensorRT then says what it refuses. What sizes in host memory hold does not choose.
    """
    dynamic = [name for name in feeds if -1 in tuple(engine.get_tensor_shape(name))]
    for number in range(engine.num_optimization_profiles):
        if all(_holds(engine.get_tensor_profile_shape(name, number), feeds[name].shape) for name in dynamic):
            return number
    return 0


def _holds(limits: Any, shape: tuple[int, ...]) -> bool:
    """Whether ``shape`` is between the smallest and the largest of ``limits``, which TensorRT gives in three shapes."""
    low, _, high = (tuple(dims) for dims in limits)
    return len(low) == len(shape) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
