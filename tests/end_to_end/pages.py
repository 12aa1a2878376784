# SPDX-License-Identifier: Apache-2.0
"""The commands that a page of ours gives, taken from its text and run as a reader would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str = "console") -> list[str]:
    """The code blocks of a page (from the repository's root) that are marked as ``language``; "" for those unmarked."""
    found, inside = [], None
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            if inside is not None and line == "```":
                found.append(inside)
                inside = None
                continue
            inside = "" if line == f"```{language}" else None
        elif inside is not None:
            inside += line + "\n"
    return found


def the_block(page: str, containing: str, language: str = "console") -> str:
    """The one block of ``page`` that has ``containing`` in it."""
    (found,) = [block for block in blocks(page, language) if containing in block]
    return found


def run(script: str, folder: Path, *, gpu: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``script`` in bash, in ``folder``, with this environment's commands; the first that fails ends it.

    ``gpu=False`` hides every GPU. ``pip install`` really resolves what it is given, from what is installed here and
    without installing: the packages are what this test runs in already. ``variables`` go into the environment.
    """
    shims = folder / "shims"
    shims.mkdir(exist_ok=True)
    pip = shims / "pip"
    flags = "--dry-run --no-index --no-build-isolation"
    pip.write_text(
        f'#!/bin/sh\n[ "$1" = install ] || exit 2\nshift\nexec {sys.executable} -m pip install {flags} "$@"\n'
    )
    pip.chmod(0o755)
    path = os.pathsep.join([str(shims), str(Path(sys.executable).parent), os.environ["PATH"]])
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "200", **hidden, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
