# SPDX-License-Identifier: Apache-2.0
"""Writing files so that a reader sees the old content or the new, never half of one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flash_export import interrupt
from flash_export.errors import MissingHere, UsageError
from flash_export.save import check_output, refuse_to_replace
from flash_trt import cpu_operator, file_kinds, native, plugin_library
from flash_trt.onnx_file import OnnxFile


def sidecar_path(engine: Path) -> Path:
    """Where the JSON about ``engine`` lies."""
    return engine.parent / f"{engine.name}.json"


def files_read(models: Iterable[OnnxFile | Path], others: Iterable[Path | None] = ()) -> list[Path]:
    """Every file that a command reads, our own libraries among them.

    Args:
        models: ONNX files, read with the weights that they keep outside; engines by their paths, read with their
            sidecars.
        others: further files; None where the user gives none.
    """
    files = [path for path in others if path is not None] + _libraries()
    for model in models:
        if isinstance(model, OnnxFile):
            files += [model.path, *model.external_files]
        else:
            files += [model, sidecar_path(model)]
    return files


def _libraries() -> list[Path]:
    named = [os.environ.get(variable) for variable in (plugin_library.VARIABLE, cpu_operator.VARIABLE)]
    found = [native.find(library) for library in (plugin_library.LIBRARY, cpu_operator.LIBRARY)]
    return [Path(name) for name in named if name] + [path for path in found if path is not None]


def check_outputs(written: Iterable[Path | None], read: Iterable[Path]) -> None:
    """Raises unless every output can be created and none of them replaces a file that is read; call it early.

    Args:
        written: where files will go; None where the user wants none.
        read: as ``files_read`` gives them.

    Raises:
        UsageError: an output is a file that is read, another output, a folder or a device, or its folder cannot be
            written to. A full disk is told of where a file is written.
    """
    wanted = [path for path in written if path is not None]
    refuse_to_replace(read, wanted)
    resolved = [os.path.realpath(path) for path in wanted]
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
        with _told(path, full=False), interrupt.temporary_file(path.parent):
            pass  # a folder may have every right and still take no file, as /proc does


def check_engine(path: Path) -> None:
    """Raises unless an engine may be put at ``path``: a free place, an empty file, or an older engine.

    Raises:
        UsageError: another file is there or where the sidecar goes, or the name promises another format.
    """
    if path.suffix.lower() in file_kinds.MODEL_SUFFIXES:
        raise UsageError(
            "an engine gets no name of a model",
            where=str(path),
            got=f"the suffix {path.suffix}",
            need="another, such as .engine",
            do=f"give -o {path.with_suffix('.engine')}",
        )
    older = path.is_file() and path.stat().st_size > 0
    if older and (kind := _kind_there(path)) != "engine":
        raise UsageError(
            "the engine would replace a file of another kind",
            where=str(path),
            got=file_kinds.SPELLED.get(kind, "a file that does not begin as an engine does"),
            need="a free name, or an older engine there",
            do=f"give -o {path.with_suffix('.engine')}, or remove that file first",
        )
    if not _free_for_sidecar(beside := sidecar_path(path)):
        raise UsageError(
            "the engine's sidecar would replace a file of yours",
            where=str(beside),
            got="a file that no flash-trt build wrote",
            need=f"{beside.name} free, or an older sidecar",
            do="give -o another name, or move that file first",
        )


def _free_for_sidecar(path: Path) -> bool:
    try:
        told = json.loads(path.read_bytes() or b"{}")
    except (FileNotFoundError, IsADirectoryError):
        return True  # a folder is refused with the other outputs
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(told, dict) and (not told or {"schema", "engine"} <= told.keys())


def _kind_there(path: Path) -> file_kinds.Kind:
    try:
        return file_kinds.kind_of(path)
    except OSError:
        return ""  # what cannot be read is not known for an engine


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One process at a time is in this block for ``folder``, and no signal ends it there: for files that go together.

    A file system without locks gives none, and then two commands with one output may still mix.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with interrupt.held():
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
    finally:
        os.close(descriptor)


def write_engine(path: Path, plan: bytes, sidecar: Mapping[str, Any]) -> None:
    """Puts an engine and what is said of it side by side; of several such writers at once one is last with both.

    Raises:
        MissingHere: the disk is full.
        UsageError: the folder is gone, or takes no file any more.
    """
    with _told(path), alone_in(path.parent):
        _write_together({path: plan, sidecar_path(path): json.dumps(sidecar, indent=2).encode() + b"\n"})


def write_atomically(path: Path, data: bytes) -> None:
    """Puts ``data`` at ``path`` by one rename of a finished, synced file beside it.

    Raises:
        MissingHere: the disk is full, or files may not become as large; what was at ``path`` is still there.
        UsageError: the folder is gone, or takes no file any more.
    """
    with _told(path):
        _write_together({path: data})


def _write_together(contents: Mapping[Path, bytes]) -> None:
    """As ``write_atomically`` for files that go together: all are finished before the first is renamed."""
    with contextlib.ExitStack() as stack:
        finished = {path: _written_beside(path, data, stack) for path, data in contents.items()}
        for path, temporary in finished.items():
            temporary.replace(path)


def _written_beside(path: Path, data: bytes, stack: contextlib.ExitStack) -> Path:
    """A file with ``data`` in the folder of ``path``, which ``stack`` removes."""
    with _told(path, size=len(data)):
        temporary = stack.enter_context(interrupt.temporary_file(path.parent))
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        return temporary


@contextlib.contextmanager
def _told(path: Path, *, size: int | None = None, full: bool = True) -> Iterator[None]:
    """What the system says against writing to ``path`` as an error of ours; with ``full`` off, not that it is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UsageError(
                "the output cannot be written",
                where=str(path),
                got=error.strerror or str(error),
                need=f"a folder {path.parent} that is there and takes files",
                do="choose another place for the output, or correct the folder; nothing was written",
            ) from error
        if full:
            raise MissingHere(
                "the disk is full" if error.errno != errno.EFBIG else "a file may not become as large here",
                where=str(path),
                got=f"{size} bytes to write: {error.strerror}" if size is not None else str(error.strerror),
                need="that much free space, and a limit of files' sizes (ulimit -f) beyond it",
                do="free some space or choose another disk; nothing was changed",
            ) from error
