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
    found = folder / f"libnvinfer_lean.so.{major}"
    if not found.exists():
        fetch = [sys.executable, str(repo_root / "scripts" / "fetch_wheels.py")]
        fetch += [str(HERE / f"tensorrt_lean_{major}.txt"), "--below", "tensorrt_lean_libs", "--into", str(folder)]
        fetched = subprocess.run(fetch, capture_output=True, text=True, timeout=300, check=False)
        if fetched.returncode != 0:
            pytest.skip(f"the lean runtime of TensorRT {major} cannot be fetched: {fetched.stderr.strip()[-300:]}")
    return found
