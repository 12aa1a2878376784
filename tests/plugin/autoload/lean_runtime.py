# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's lean runtimes of TensorRT: real plugin registries and runtimes that load without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def library(repo_root: Path, major: str) -> Path:
    """``libnvinfer_lean.so.MAJOR``, fetched once into the build folder; skips the test where that fails."""
    folder = repo_root / "build" / "tensorrt_lean" / major
    return _fetched(repo_root, f"tensorrt_lean_{major}", "tensorrt_lean_libs", folder, f"libnvinfer_lean.so.{major}")


def bindings(repo_root: Path) -> Path:
    """The folder to import TensorRT 11's ``tensorrt_lean_bindings`` from, fetched like ``library``."""
    name = "tensorrt_lean_bindings"
    version = f"11_bindings_{sys.version_info.major}.{sys.version_info.minor}"
    folder = repo_root / "build" / "tensorrt_lean" / version / name
    return _fetched(repo_root, "tensorrt_lean_11_bindings", name, folder, "__init__.py").parent.parent


def _fetched(repo_root: Path, requirements: str, below: str, folder: Path, wanted: str) -> Path:
    """A file of the wheel that ``requirements`` pins."""
    found = folder / wanted
    if not found.exists():
        fetch = [sys.executable, str(repo_root / "scripts" / "fetch_wheels.py")]
        fetch += [str(HERE / f"{requirements}.txt"), "--below", below, "--into", str(folder)]
        fetched = subprocess.run(fetch, capture_output=True, text=True, timeout=300, check=False)
        if fetched.returncode != 0:
            pytest.skip(f"{requirements} cannot be fetched: {fetched.stderr.strip()[-300:]}")
    return found
