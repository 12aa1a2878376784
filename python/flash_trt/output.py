# SPDX-License-Identifier: Apache-2.0
"""Writing files so that a reader sees the old content or the new, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from flash_export.errors import MissingHere


def write_atomically(path: Path, data: bytes) -> None:
    """Puts ``data`` at ``path`` by one rename of a finished, synced file beside it.

    Raises:
        MissingHere: the disk is full; what was at ``path`` is still there.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MissingHere(
            "the disk is full",
            where=str(path),
            got=f"{len(data)} bytes to write",
            need="that much free space",
            do="free some space or choose another disk; nothing was changed",
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
