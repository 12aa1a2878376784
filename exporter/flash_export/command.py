# SPDX-License-Identifier: Apache-2.0
"""The outer edge of both commands: every way a command can end becomes its exit code and a readable message.

Signals, and readers that leave, are ``process``'s.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import platform
import sys
import traceback
from collections.abc import Callable, Sequence

import typer

from flash_export import __version__
from flash_export.errors import EXIT_INTERNAL, EXIT_MISSING, EXIT_OK, MissingHere, UserError
from flash_export.talk import printable

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FOLDER = "No usable temporary directory"
"""How Python's ``tempfile`` says that every folder for temporary files is full, without the system's number of it."""

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def run(app: typer.Typer | Callable[[], int], arguments: Sequence[str] | None = None) -> int:
    """Runs ``app`` and returns the exit code of design section "Exit codes"; messages go to stderr.

    Args:
        app: the command; a function, which reads its arguments itself, gives its exit code.
        arguments: what follows the command's name; None reads ``sys.argv``.
    """
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it tells of files that it reads all the same
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that it cannot spell is escaped, as by stderr
    try:
        if isinstance(app, typer.Typer):
            name = typer.main.get_command(app).name or "flash-export"
            code = app(args=None if arguments is None else list(arguments), prog_name=name, standalone_mode=False)
        else:
            code = app()
        print(end="", flush=True)  # here, where a full disk can still be told of
        return code if isinstance(code, int) else EXIT_OK
    except UserError as error:
        _say(f"error: {error}")
        return error.exit_code
    except typer.TyperException as error:  # what typer's own copy of click raises for a wrong flag
        with contextlib.suppress(OSError):
            error.show(file=sys.stderr)  # type: ignore[attr-defined]
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in _NO_SPACE and _NO_FOLDER not in str(error):
            return _our_bug()
        return _no_space(error)
    except MemoryError as error:
        return _missing(
            "this machine ran out of memory",
            where="the whole command",
            got=str(error) or "an allocation that was refused",
            need="more memory, or a smaller model or shapes",
            do="close other programs, or run this on a larger machine; nothing was written",
        )
    except Exception:
        return _our_bug()


def _no_space(error: OSError) -> int:
    got = f"{error.strerror or error} (errno {error.errno})"
    if _holds_text():
        return _missing(
            "there is no space left for what the command says",
            where="standard output",
            got=got,
            need="a terminal, a pipe, or a file on a disk with room for it",
            do="send it elsewhere, or free some space on that disk",
        )
    return _missing(
        "there is no space left on this machine",
        where=str(error.filename or "temporary files"),
        got=got,
        need="room for the files, and a limit of their sizes (ulimit -f) that holds them",
        do="free some space, or set TMPDIR to a folder on another disk; nothing was written",
    )


def _holds_text() -> bool:
    """Whether standard output holds text that it cannot write."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def _missing(what: str, *, where: str, got: str, need: str, do: str) -> int:
    _say(f"error: {MissingHere(what, where=where, got=got, need=need, do=do)}")
    return EXIT_MISSING


def _our_bug() -> int:
    _say(traceback.format_exc())
    _say("internal error: this is our bug; please report it with the lines above and these:")
    _say(f"  flash-export {__version__}, Python {platform.python_version()}, {platform.platform()}")
    return EXIT_INTERNAL


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr)
