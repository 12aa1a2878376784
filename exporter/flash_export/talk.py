# SPDX-License-Identifier: Apache-2.0
"""What a command says while it works: steps with their times on stderr, results on stdout.

A terminal gets a spinner that turns into a line; anything else gets plain lines. ``quiet`` silences the steps, never
the warnings or the results.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.status import Status

_FILE_WIDTH = 160
"""Columns of a table in a file or a pipe, where rich would assume 80 and fold every name."""


def printable(text: str) -> str:
    """``text`` with every control character but the newline written out: names in a file must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def plain(text: str) -> str:
    """``text`` for a line or a table of rich: nothing in it is markup or a control character."""
    return escape(printable(text))


class Talk:
    """Progress and warnings of one run. ``seconds`` holds each finished step's time, ``warnings`` what was warned of.

    ``silent`` prints nothing at all: for callers that are programs. ``steps`` names the steps to come, where they are
    known: each is then counted, ``2/6``.
    """

    def __init__(self, *, quiet: bool = False, silent: bool = False) -> None:
        self.quiet = quiet or silent
        self.silent = silent
        self.steps: tuple[str, ...] = ()
        self.warnings: list[str] = []
        self.seconds: dict[str, float] = {}
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._out = Console(highlight=False)
        if not self._out.is_terminal:
            self._out.width = _FILE_WIDTH
        self._status: Status | None = None
        self._step = ""

    @contextlib.contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Times the block as step ``name``; ``what`` says in a few words what it does."""
        start = time.monotonic()
        count = f"{self.steps.index(name) + 1}/{len(self.steps)} " if name in self.steps else ""
        self._step = f"{count}{name:<8} {plain(what)}"
        live = self._err.status(self._step) if self._err.is_terminal and not self.quiet else contextlib.nullcontext()
        with live as self._status:
            yield
        self._status = None
        self.seconds[name] = round(time.monotonic() - start, 3)
        self.say(f"{self._step}  [dim]{self.seconds[name]:.1f} s[/dim]")

    def progress(self, what: str, done: int, total: int) -> None:
        """Shows how far the running step has come; only a terminal sees it."""
        if self._status is not None:
            self._status.update(f"{self._step}  [dim]{done}/{total} {plain(what)}[/dim]")

    def say(self, markup: str) -> None:
        """One line of talk, in rich's markup."""
        if not self.quiet:
            self._err.print(markup)

    def warn(self, text: str) -> None:
        """A warning, shown even when quiet."""
        self.warnings.append(text)
        if self.silent:
            return
        self._err.print(f"[yellow]warning:[/yellow] {plain(text)}")

    def result(self, renderable: object) -> None:
        """A result, on stdout."""
        if self.silent:
            return
        self._out.print(renderable)
