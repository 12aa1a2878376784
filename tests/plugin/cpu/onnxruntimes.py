# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime in several versions, each in a folder under build/, filled from the package index and kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OFFLINE = "FLASH_EXPORT_OFFLINE"
NUMPY_1 = "numpy<2"
"""What ONNX Runtime up to 1.18 was built for; its code imports of other packages NumPy alone."""


def pip(*arguments: str) -> str:
    """What pip prints; fails the test, with pip's words, where it does not come back with success.

    A machine without a package index says so by the variable ``FLASH_EXPORT_OFFLINE``: the test is then skipped.
    """
    if os.environ.get(OFFLINE):
        pytest.skip(f"{OFFLINE} is set, so no other ONNX Runtime can be fetched")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    if done.returncode:
        words = f"{' '.join(arguments)}: {done.stderr.strip()[-600:]}"
        pytest.fail(f"pip cannot install here; set {OFFLINE}=1 where there is no index: {words}", pytrace=False)
    return done.stdout


def newest() -> str:
    """The newest version that the index has for this Python."""
    report = pip("--dry-run", "--ignore-installed", "--report", "-", "onnxruntime")
    return str(json.loads(report)["install"][0]["metadata"]["version"])


def environment(root: Path, version: str, numpy: str = "numpy") -> Path:
    """A folder with ``onnxruntime==version`` and NumPy alone, filled once for each set of requirements."""
    wanted = [f"onnxruntime=={version}", numpy]
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    folder = root / "build" / "onnxruntime" / f"{version}-{numpy.replace('<', '-below-')}-{python}"
    if not folder.is_dir():
        filling = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            pip("--target", str(filling), *wanted)
            filling.rename(folder)
        finally:
            shutil.rmtree(filling, ignore_errors=True)
    return folder


def run(packages: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script where ``packages`` are the only ones beside Python's own."""
    alone = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-S", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=alone)
