# SPDX-License-Identifier: Apache-2.0
"""How far Triton's ONNX Runtime backend may optimize a file: no further than where a process survives it."""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from flash_export import runtime_defects
from flash_export.talk import Talk

NUMBERS = {"ORT_ENABLE_ALL": 0, "ORT_ENABLE_EXTENDED": 1, "ORT_ENABLE_BASIC": -1, "ORT_DISABLE_ALL": 2}
"""ONNX Runtime's level -> ``optimization.graph.level`` of ``config.pbtxt``, as the backend's README and source read it
(github.com/triton-inference-server/onnxruntime_backend); its default is the first. Single optimizations have no name.
"""


def level_for(model: Path, library: str, talk: Talk) -> int:
    """The backend's level for ``model``, with the operator library where it needs one; a warning where it is not 0.

    The trial is that of ``flash-export``, in the ONNX Runtime of this environment: a server's may be another.
    """
    level, why = runtime_defects.level_that_loads(model, library)
    if why:
        talk.warn(
            f"the model {why}: config.pbtxt has the server's stop before that (optimization.graph.level"
            f" {NUMBERS[level]}, {level}); tried in ONNX Runtime {onnxruntime.__version__}, a server's may differ"
        )
    return NUMBERS[level]
