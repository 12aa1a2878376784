# SPDX-License-Identifier: Apache-2.0
"""A command as a process: signals and closed pipes from its first moment to its exit code. Imports nothing heavy."""

from __future__ import annotations

import importlib
import io
import sys
from typing import NoReturn, TextIO

from flash_export import interrupt


class _Leavable(io.FileIO):
    """A file descriptor whose reader may leave (``| head``): what it would still be told is dropped.

    The work goes on, so that files are written and the exit code is what came out, as if nobody had looked.
    """

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def main(cli: str, entry: str = "app") -> NoReturn:
    """The console script of the command that is ``entry`` in module ``cli``, as ``command.run`` takes it."""
    interrupt.end_on_signals()
    sys.stdout, sys.stderr = _leavable(sys.stdout), _leavable(sys.stderr)
    # Only now: these take a second, in which Ctrl-C may come too.
    command = importlib.import_module("flash_export.command")
    code = command.run(getattr(importlib.import_module(cli), entry))
    interrupt.too_late()
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (AttributeError, OSError):  # closed, or full and told of: Python would end with a code of its own
            setattr(sys, name, None)
    sys.exit(code)


def _leavable(stream: TextIO) -> TextIO:
    """``stream``, its reader free to leave; as it is where it is no file descriptor's."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):  # closed before we came, or something in memory
        return stream
    raw = io.BufferedWriter(_Leavable(descriptor, "w", closefd=False))
    lines = stream.isatty() or stream is sys.stderr
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=lines)
