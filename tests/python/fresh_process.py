# SPDX-License-Identifier: Apache-2.0
"""Runs Python in a process of its own: a TensorRT registry keeps what was loaded into it until its process ends."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with this process's import path and the variables given on top."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=variables
    )
