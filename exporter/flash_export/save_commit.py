# SPDX-License-Identifier: Apache-2.0
"""The one rename by which an export takes the place of the one before, whatever files it has.

All new files lie complete in a hidden folder beside the output when its ``MARKER`` appears, by one rename. From then on
the export is the new one: its files are moved into place, and where a kill interrupts that, whatever of flash-export
or flash-trt comes next to the output or its unfused twin moves the rest (``finish_interrupted``). Before the marker
nothing has changed. Where a move fails, a second marker, ``UNDO``, turns the folder into the way back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from flash_export import interrupt
from flash_export.errors import UsageError
from flash_export.save_weights import write_synced

MARKER, UNDO = ".committed", ".undone"
OLD = ".old"
"""Holds a second name of each file that is replaced, until the export is complete."""
WEIGHTS = re.compile(r"[^/\\]+\.[0-9a-f]{16}\.data")
_HIDDEN = re.compile(r"\.(?P<output>.+)\." + re.escape(socket.gethostname()) + r"-(?P<pid>\d+)\.partial")
_running: set[Path] = set()
"""The hidden folders that this process is filling."""


@contextlib.contextmanager
def hidden_folder(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` to collect its files in; what is not committed goes with it at the end.

    Completes or removes first what killed runs left for this output.

    Raises:
        OSError: the folder cannot be made.
    """
    folder = output.parent / f".{output.name}.{socket.gethostname()}-{os.getpid()}.partial"
    finish_interrupted(output)
    for left, of in _abandoned(output.parent):
        if of == output.name:
            shutil.rmtree(left, ignore_errors=True)
    folder.mkdir()
    _running.add(folder)
    try:
        with interrupt.removed_on_signal(folder):
            yield folder
    finally:
        _running.discard(folder)
        if not (folder / UNDO).exists():  # else not even the way back was open: it is for the next run
            shutil.rmtree(folder, ignore_errors=True)


def commit(folder: Path, names: Iterable[str], unused: Iterable[str] = ()) -> None:
    """Moves the files ``names`` from the hidden ``folder`` to the one around it, all or, where one fails, none.

    Args:
        folder: what ``hidden_folder`` gave, with the files in it, written and synced.
        names: the files, in the order in which they are to be moved.
        unused: weights' files beside the output that nothing refers to once that is done; removed at the end.

    Raises:
        OSError: a file cannot be moved; those that were there before are in place again.
    """
    target, ordered = folder.parent, list(names)
    (folder / OLD).mkdir()
    for name in filter(lambda name: (target / name).exists(), ordered):
        _keep(target / name, folder / OLD / name)
    record = folder / f"{MARKER}.part"
    write_synced(record, json.dumps({"names": ordered, "unused": sorted(unused)}).encode())
    sync_folder(folder)
    with interrupt.held(), interrupt.kept_on_signal(folder):
        record.replace(folder / MARKER)
        sync_folder(folder)
        try:
            _move_all(folder)
        except BaseException:
            (folder / MARKER).replace(folder / UNDO)
            _move_back(folder)
            raise


def finish_interrupted(path: Path) -> None:
    """Completes every export that was killed after its commit and has a file named ``path``, in that folder.

    Only exports of this machine whose process is gone; nothing else is touched.

    Raises:
        UsageError: a file cannot be moved.
    """
    try:
        _finish(path)
    except OSError as error:
        raise UsageError(
            "an export that was killed while it replaced this file cannot be completed",
            where=str(path),
            got=f"{error.strerror}: {error.filename}",
            need="to move the finished files out of the hidden folder beside it",
            do="run this once where that folder can be written, or export again",
        ) from error


def _finish(path: Path) -> None:
    for folder, _ in _abandoned(path.parent):
        if (folder / UNDO).exists() and path.name in _record(folder, UNDO)["names"]:
            _move_back(folder)
        elif (folder / MARKER).exists() and path.name in _record(folder, MARKER)["names"]:
            _move_all(folder)
        else:
            continue
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """All is in place by now: where a folder cannot be synced, a power cut may still bring the old files back."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move_all(folder: Path) -> None:
    for name in _record(folder, MARKER)["names"]:
        if (folder / name).exists():
            (folder / name).replace(folder.parent / name)
    sync_folder(folder.parent)
    for name in _record(folder, MARKER)["unused"]:
        (folder.parent / name).unlink(missing_ok=True)


def _move_back(folder: Path) -> None:
    """What was kept stays until the end, so that this can be done again."""
    for name in reversed(_record(folder, UNDO)["names"]):
        if not (folder / OLD / name).exists():
            (folder.parent / name).unlink(missing_ok=True)
            continue
        again = folder / f".{name}.again"
        again.unlink(missing_ok=True)
        _keep(folder / OLD / name, again)
        again.replace(folder.parent / name)
    sync_folder(folder.parent)
    (folder / UNDO).unlink()


def _record(folder: Path, marker: str) -> dict[str, list[str]]:
    """What ``commit`` wrote, as far as it is of this output: a record made by someone else reaches no other file."""
    match = _HIDDEN.fullmatch(folder.name)
    assert match is not None
    ours = re.compile(re.escape(Path(match["output"]).stem) + r"\.[^/\\]+|report\.(json|html)")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((folder / marker).read_bytes())
        names = [name for name in found["names"] if ours.fullmatch(name) or name == match["output"]]
        return {"names": names, "unused": [name for name in found["unused"] if WEIGHTS.fullmatch(name)]}
    return {"names": [], "unused": []}


def _abandoned(parent: Path) -> Iterator[tuple[Path, str]]:
    """Hidden folders of killed runs on this machine, each with the name of its output."""
    entries = []
    with contextlib.suppress(OSError):  # a folder that cannot be listed is not one that exports go to
        entries = list(parent.iterdir())
    for entry in entries:
        match = _HIDDEN.fullmatch(entry.name)
        if match and entry not in _running and not _alive(int(match["pid"])):
            yield entry, match["output"]


def _alive(pid: int) -> bool:
    if pid == os.getpid():  # an earlier process had this number, as happens in containers
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _keep(target: Path, kept: Path) -> None:
    """A second name for what lies at ``target``; a copy where the file system has no links."""
    try:
        os.link(target, kept)
    except OSError:
        shutil.copy2(target, kept)
