# SPDX-License-Identifier: Apache-2.0
"""What every attack tries to do: create a file. Nothing here does harm."""

from __future__ import annotations

from pathlib import Path


class Payload:
    """Unpickled without care, it creates ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return eval, (expression(self.marker),)


def expression(marker: Path) -> str:
    """A Python expression that creates ``marker``."""
    return f"__import__('pathlib').Path({str(marker)!r}).touch()"
