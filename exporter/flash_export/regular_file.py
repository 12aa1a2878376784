# SPDX-License-Identifier: Apache-2.0
"""Only files are read: a pipe that nobody writes to would be waited for without end, and a device has no end."""

from __future__ import annotations

import stat
from pathlib import Path


def require(path: Path) -> None:
    """Raises where reading ``path`` would not end as reading a file does.

    Raises:
        OSError: there is nothing, or it is a pipe, a socket or a device. A folder is left to whoever opens it.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError("not a regular file")


def head(path: Path, size: int) -> bytes:
    """The first ``size`` bytes, fewer where the file is shorter.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    require(path)
    with path.open("rb") as file:
        return file.read(size)
