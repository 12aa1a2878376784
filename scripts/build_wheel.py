# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel that others install: one file for every Python from 3.11 on, and checks it.

    python scripts/build_wheel.py dist

It is ``pip wheel`` by this environment's tools in the folder of ``make test``: after that it compiles nothing and holds
the libraries that were tested. ``wheel_backend`` has auditwheel tag it; a wheel for this machine alone is no wheel for
others.

Ends with 0: the wheel lies there, and its path is printed last; 1: it needs a library that it may not, or is too large.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = "build/native"
"""The build folder of ``make test`` (Makefile), from ``ROOT``; a plain ``pip wheel`` has one of its own."""

LIMIT_BYTES = 30 << 20
ON_EVERY_LINUX = ("manylinux", "musllinux")


def build(folder: Path) -> Path:
    """Builds the wheel into ``folder``."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-C", f"build-dir={NATIVE}"]
    # This environment's cmake and ninja before the system's.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run([*command, "-w", str(folder), str(ROOT)], check=True, env={**os.environ, "PATH": path})
    (wheel,) = folder.glob("*.whl")
    return wheel


def find_fault(wheel: Path) -> str:
    """Why this wheel is not for others; empty: it is."""
    size = wheel.stat().st_size
    if size > LIMIT_BYTES:
        return f"{wheel.name} has {size} bytes; the limit is {LIMIT_BYTES}"
    if not any(tag in wheel.name for tag in ON_EVERY_LINUX):
        return f"{wheel.name} has no manylinux tag; `auditwheel show` says which symbol of which library forbids one"
    with zipfile.ZipFile(wheel) as archive:
        foreign = [name for name in archive.namelist() if ".libs/" in name]
    return f"{wheel.name} would carry libraries of this machine: {', '.join(foreign)}" if foreign else ""


def main() -> int:
    """Builds and checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the wheel goes")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        if fault := find_fault(wheel):
            print(fault, file=sys.stderr)
            return 1
        wheel = Path(shutil.move(wheel, out / wheel.name))
    print(f"{wheel.stat().st_size / 2**20:.1f} MiB")
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
