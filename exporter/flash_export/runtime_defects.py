# SPDX-License-Identifier: Apache-2.0
"""A defect of ONNX Runtime that files of ours would meet, and the way round it.

ONNX Runtime 1.32's CPU provider crashes while it optimizes some fp16 graphs. Two operators are enough: a Transpose of
[1, 0, 2] hands an input to a MatMul, as ``nn.MultiheadAttention(batch_first=True)`` begins. ``MatmulTransposeFusion``
moves a Cast above the Transpose, and ``NchwcTransformer`` ends the process after it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

AVOIDED = "MatmulTransposeFusion"
"""The optimization without which such a graph loads."""

LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL")
"""ONNX Runtime's levels of optimization, its default first and then ever less."""

_TRIED_BYTES = 1 << 30
"""A larger file is not loaded a second time, in fp32, to see whether that crashes."""

_LOADS = """
import sys, onnxruntime
path, level, library, *disabled = sys.argv[1:]
settings = onnxruntime.SessionOptions()
settings.log_severity_level = 4
settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
settings.add_session_config_entry("session.load_model_format", "ONNX")
if library:
    settings.register_custom_ops_library(library)
onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)
"""


def disabled_optimizers(path: Path) -> list[str]:
    """What a session of our own for this file leaves out: nothing, but for a graph in fp16."""
    return [AVOIDED] if _may_crash(path) else []


def crash_of(path: Path) -> str:
    """How ONNX Runtime ends a process that loads this file with its default optimizations; empty where it does not."""
    if not _may_crash(path) or _is_large(path) or (signal := _signal(path)) == 0:
        return ""
    way = f"; a session with disabled_optimizers=['{AVOIDED}'] loads it" if _signal(path, AVOIDED) == 0 else ""
    return f"its optimizations crash on this graph in fp16 (signal {signal}){way}"


def level_that_loads(path: Path, library: str) -> tuple[str, str]:
    """The most optimization with which ONNX Runtime loads this file, for who cannot leave a single one out, and why.

    Args:
        library: of operators that the session has besides; empty for none.

    Returns:
        A name of ``onnxruntime.GraphOptimizationLevel``, and what became of the default one; that is empty where the
        default loads the file. A file too large to try gets the first level without the optimizations of layouts, of
        which ``NchwcTransformer`` is one.
    """
    first, *less = LEVELS
    if not _may_crash(path):
        return first, ""
    if _is_large(path):
        return less[0], "is in fp16 and too large to try whether ONNX Runtime's default optimizations crash on it"
    if (signal := _signal(path, library=library)) == 0:
        return first, ""
    loads = next((level for level in less if _signal(path, level=level, library=library) == 0), less[-1])
    return loads, f"ends a process that loads it with ONNX Runtime's default optimizations (signal {signal})"


def _is_large(path: Path) -> bool:
    files = {path, *(p for p in path.parent.glob(f"{path.stem}*") if p.is_file())}  # its weights may be beside it
    return sum(file.stat().st_size for file in files) > _TRIED_BYTES


def _may_crash(path: Path) -> bool:
    """Whether an input, an output or a weight of the graph is in fp16."""
    try:
        graph = onnx.load(path, format="protobuf", load_external_data=False).graph
    except (OSError, DecodeError):  # no model: whoever loads it says so
        return False
    half = onnx.TensorProto.FLOAT16
    values = (*graph.input, *graph.output)
    return any(v.type.tensor_type.elem_type == half for v in values) or any(
        weight.data_type == half for weight in graph.initializer
    )


def _signal(path: Path, *disabled: str, level: str = LEVELS[0], library: str = "") -> int:
    """The signal that ends a process of its own; 0 where none does."""
    command = [sys.executable, "-c", _LOADS, str(path), level, library, *disabled]
    child = subprocess.run(command, capture_output=True, check=False)
    return max(0, -child.returncode)
