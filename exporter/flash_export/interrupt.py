# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and SIGHUP end a command at once: one line, exit code 128 + signal, no temporary file left.

Python's own way, a KeyboardInterrupt wherever the program happens to be, does not end every program: raised inside an
import it leaves half a module, raised in a callback it is thrown away or tears C++ down, as the first import of torch
shows. So the handler of ``end_on_signals`` removes what the registry here holds and leaves without unwinding. Only
commands install it; in a program that calls our functions an interrupt is what that program makes of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"
"""A spinner hides the cursor of its terminal."""

_temporary: set[Path] = set()
_held: list[int] = []
"""An entry for each block in ``held`` that runs."""
_pending: list[int] = []


def end_on_signals() -> None:
    """From now on each of ``SIGNALS`` ends this process; one that is ignored (``nohup``) stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _received)


def too_late() -> None:
    """The command is done and only its exit code is to come: from now on Ctrl-C changes nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """For a block that must not be left in the middle, such as two renames that belong together: a signal waits."""
    _held.append(0)
    try:
        yield
    finally:
        _held.pop()
        if _pending and not _held:
            _end(_pending[0])


@contextlib.contextmanager
def removed_on_signal(path: Path) -> Iterator[None]:
    """Within the block ``path``, file or folder, goes when a signal ends the command; the block removes it else."""
    _temporary.add(path)
    try:
        yield
    finally:
        _temporary.discard(path)


@contextlib.contextmanager
def kept_on_signal(path: Path) -> Iterator[None]:
    """The other way round: within the block, and from an error in it on, ``path`` stays."""
    removed = path in _temporary
    _temporary.discard(path)
    yield
    if removed:
        _temporary.add(path)


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[str]:
    """``tempfile.TemporaryDirectory`` that a signal removes too."""
    with contextlib.ExitStack() as stack:
        with held():
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=parent))
            stack.enter_context(removed_on_signal(Path(name)))
        yield name


@contextlib.contextmanager
def temporary_file(parent: Path) -> Iterator[Path]:
    """An empty file in ``parent`` that is gone at the end, however that comes, unless it was renamed by then.

    Raises:
        OSError: it cannot be made there.
    """
    with contextlib.ExitStack() as stack:
        with held():
            descriptor, name = tempfile.mkstemp(prefix=".flash-trt-", dir=parent)
            os.close(descriptor)
            stack.callback(Path(name).unlink, missing_ok=True)
            stack.enter_context(removed_on_signal(Path(name)))
        yield Path(name)


def _received(number: int, frame: FrameType | None) -> None:
    if _held:
        _pending.append(number)
    else:
        _end(number)


def _end(number: int) -> None:
    for path in list(_temporary):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    # Not print: the signal may have come in the middle of one.
    with contextlib.suppress(OSError):
        cursor = _SHOW_CURSOR + b"\r" if os.isatty(2) else b""
        os.write(2, cursor + b"interrupted\n")
    # Not sys.exit: what is in memory may be half made, and tearing it down may crash.
    os._exit(128 + number)
