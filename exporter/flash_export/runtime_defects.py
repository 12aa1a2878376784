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

_TRIED_BYTES = 1 << 30
"""A larger file is not loaded a second time, in fp32, to see whether that crashes."""

_LOADS = """
import sys, onnxruntime
path, *disabled = sys.argv[1:]
settings = onnxruntime.SessionOptions()
settings.log_severity_level = 4
onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)
"""


def disabled_optimizers(path: Path) -> list[str]:
    """What a session of our own for this file leaves out: nothing, but for a graph in fp16."""
    return [AVOIDED] if _has_halves(path) else []


def crash_of(path: Path) -> str:
    """How ONNX Runtime ends a process that loads this file with its default optimizations; empty where it does not."""
    files = {path, *(p for p in path.parent.glob(f"{path.stem}*") if p.is_file())}  # its weights may be beside it
    if sum(file.stat().st_size for file in files) > _TRIED_BYTES or not _has_halves(path):
        return ""
    if (signal := _signal(path, [])) == 0:
        return ""
    way = f"; a session with disabled_optimizers=['{AVOIDED}'] loads it" if _signal(path, [AVOIDED]) == 0 else ""
    return f"its optimizations crash on this graph in fp16 (signal {signal}){way}"


def _has_halves(path: Path) -> bool:
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


def _signal(path: Path, disabled: list[str]) -> int:
    """The signal that ends a process of its own; 0 where none does."""
    child = subprocess.run([sys.executable, "-c", _LOADS, str(path), *disabled], capture_output=True, check=False)
    return max(0, -child.returncode)
