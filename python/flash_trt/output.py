# SPDX-License-Identifier: Apache-2.0
"""Writing files so that a reader sees the old content or the new, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from flash_export.errors import MissingHere, UsageError
from flash_export.save import check_output, refuse_to_replace


def check_outputs(written: Iterable[Path | None], read: Iterable[Path]) -> None:
    """Raises unless every output can be created and none of them replaces a file that is read; call it first.

    Args:
        written: where files will go; None where the user wants none.
        read: the models, with what they keep outside.

    Raises:
        UsageError: an output is a file that is read, another output, a folder or a device, or its folder cannot be
            written to.
    """
    wanted = [path for path in written if path is not None]
    refuse_to_replace(read, wanted)
    resolved = [path.resolve() for path in wanted]
    if twice := [path for path, place in zip(wanted, resolved, strict=True) if resolved.count(place) > 1]:
        raise UsageError(
            "two outputs would be one file",
            where=str(twice[0]),
            got=" and ".join(map(str, twice)),
            need="a path of its own for each output",
            do="give one of them another name",
        )
    for path in wanted:
        check_output(path)


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
