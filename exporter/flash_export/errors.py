# SPDX-License-Identifier: Apache-2.0
"""The errors of both commands and their exit codes.

A user's mistake is a ``UserError``: five parts, no traceback, its own exit code. Anything else that
escapes is our own bug and ends with ``EXIT_INTERNAL`` and a traceback.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_NUMBERS_DIFFER = 1
EXIT_USAGE = 2
EXIT_UNSAFE = 3
EXIT_UNSUPPORTED = 4
EXIT_MISSING = 5
EXIT_INTERNAL = 70


class UserError(Exception):
    """Something the user can act on.

    Args:
        what: what failed, one sentence without a full stop.
        where: the node, tensor or file it failed at.
        got: what was found there.
        need: what is required instead.
        do: what the user can do about it.
    """

    exit_code = EXIT_USAGE

    def __init__(self, what: str, *, where: str, got: str, need: str, do: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.got = got
        self.need = need
        self.do = do

    def __str__(self) -> str:
        return f"{self.what}\n  where {self.where}\n  got   {self.got}\n  need  {self.need}\n  do    {self.do}"


class UsageError(UserError):
    """A wrong flag, an unreadable input or an output that cannot be created."""

    exit_code = EXIT_USAGE


class NumbersDiffer(UserError):
    """The fused model or one of its sites does not compute what the unfused one does."""

    exit_code = EXIT_NUMBERS_DIFFER


class UnsafeInput(UserError):
    """Opening the file would run code that it carries."""

    exit_code = EXIT_UNSAFE


class UnsupportedModel(UserError):
    """No attention was found, something was refused under --require-all, or the model cannot be exported."""

    exit_code = EXIT_UNSUPPORTED


class MissingHere(UserError):
    """This machine lacks a GPU, TensorRT, the plugin, a compiler, a Python package or disk space."""

    exit_code = EXIT_MISSING
