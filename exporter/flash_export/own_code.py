# SPDX-License-Identifier: Apache-2.0
"""Modules of the user's own, which ``--model`` and ``--pattern`` name: imported from the working folder, told apart
from ours where they fail.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

ANYTHING = (Exception, SystemExit)
"""What the user's own code may raise; a script without ``if __name__ == "__main__"`` ends in SystemExit."""


def is_dotted(name: str) -> bool:
    """Whether ``name`` has the form ``PKG.MOD``."""
    return all(part.isidentifier() for part in name.split("."))


def import_from_here(name: str) -> ModuleType:
    """The module, the working folder on the path. It runs; whatever it raises comes through (``ANYTHING``)."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def forget(name: str, kept: Collection[str]) -> None:
    """Lets the next import of the module run again, with its package and what lies in that; all but those ``kept``."""
    root = name.partition(".")[0]
    for loaded in list(sys.modules):
        if loaded.partition(".")[0] == root and loaded not in kept:
            del sys.modules[loaded]


def raised(error: BaseException) -> str:
    """The exception, and the user's line that it comes from."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if _is_own(f)]
    at = f", raised at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {str(error)[:300]}{at}"


def recurs_in_own(error: BaseException) -> bool:
    """Whether the calls that led to it are no functions of ours for the greater part."""
    frames = traceback.extract_tb(error.__traceback__)
    return 2 * sum(map(_is_own, frames)) > len(frames)


def _is_own(frame: traceback.FrameSummary) -> bool:
    return "importlib" not in frame.filename and Path(__file__).parent not in Path(frame.filename).parents
