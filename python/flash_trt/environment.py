# SPDX-License-Identifier: Apache-2.0
"""What a bug report must say of a machine: versions, the plugin's file, the compiler, the GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import flash_trt
from flash_export.errors import MissingHere, UserError
from flash_trt import backends, gpu, plugin_library

_PACKAGES = (
    "torch", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "transformers", "numpy", "polygraphy",
    "tensorrt", "tensorrt-rtx-cu13", "cuda-python",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Everything ``flash-trt env`` prints. Never fails: what is missing is null, with the reason where there is one."""
    return {
        "schema": 1,
        "flash_export": flash_trt.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "plugin": _plugin(),
        "nvcc": _nvcc(),
        "cuda_driver": gpu.driver_version(),
        "gpus": [{"name": d.name, "sm": d.sm, "memory_bytes": d.memory_bytes} for d in gpu.devices()],
    }


def as_lines(description: dict[str, Any]) -> list[str]:
    """The same as aligned ``name  value`` lines."""
    rows: list[tuple[str, str]] = []
    for name, value in description.items():
        if name == "schema":
            continue
        if isinstance(value, dict):
            rows += [(f"{name}.{key}", _spell(inner)) for key, inner in value.items()]
        elif isinstance(value, list):
            rows += [(f"{name}[{i}]", _spell(inner)) for i, inner in enumerate(value)] or [(name, "none")]
        else:
            rows.append((name, _spell(value)))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _spell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return "not installed" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugin() -> dict[str, Any]:
    """The library's file, and what each installed TensorRT makes of it."""
    try:
        path = plugin_library.find()
    except MissingHere as error:
        return {"file": None, "problem": f"{error.got} ({error.where})"}
    described: dict[str, Any] = {"file": str(path), "sha256": plugin_library.sha256_of(path)}
    for name in ("tensorrt", "tensorrt-rtx"):
        if backends.is_installed(name):  # type: ignore[arg-type]
            described[name] = _registered(name)
    return described


def _registered(name: Any) -> str:
    try:
        library = plugin_library.load(backends.load(name))
    except UserError as error:
        return f"{error.what}: {error.got}"
    return ", ".join(f"{operator} version {version}" for operator, version in sorted(library.operators.items()))


def _nvcc() -> str | None:
    candidates = [shutil.which("nvcc"), *sorted(map(str, Path("/usr/local").glob("cuda*/bin/nvcc")), reverse=True)]
    for nvcc in filter(None, candidates):
        try:
            told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if release := re.search(r"release ([\d.]+)", told):
            return f"{release[1]} ({nvcc})"
    return None
