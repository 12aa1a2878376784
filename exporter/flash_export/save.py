# SPDX-License-Identifier: Apache-2.0
"""Step 6: the fused model, its unfused twin, their weights and the report appear together, or nothing does.

Everything is written into a hidden folder beside the output, synced to disk, and renamed into place one file each,
the fused ``.onnx`` last. A full disk leaves the files that were there before; so does a kill, except that it may fall
between two renames, and then each file is whole and old or new:

- the weights' file is named after its content, so that new weights never replace those an older ``.onnx`` refers to;
- weights that nothing refers to any more go only after the last rename;
- the hidden folder of a run that was killed is removed by the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import onnx_ir as ir

from flash_export.errors import MissingHere, UsageError, UserError
from flash_export.save_weights import tensors_of, write_model, write_synced, write_weights

INLINE_LIMIT_BYTES = 100 * 1000 * 1000
"""Weights above this lie in a file of their own: protobuf ends at 2 GB, and a big file is slow to parse."""
REPORT = "report.json"
PAGE = "report.html"


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """What was published. ``data`` is None where the weights are inside; ``unfused`` may be the source itself."""

    output: Path
    unfused: Path
    data: Path | None
    report: Path


@dataclasses.dataclass(slots=True)
class Staged:
    """Files that are written and not yet published: ``fused`` and ``unfused`` can be checked as they will be."""

    fused: Path
    unfused: Path
    output: Path
    data: Path | None
    folder: Path

    @property
    def published_unfused(self) -> Path:
        """Where the unfused model will lie: beside the output, or where the user's own file is."""
        return unfused_path(self.output) if self.unfused.parent == self.folder else self.unfused

    def publish(
        self, report: Mapping[str, object], report_folder: Path | None = None, *, page: str | None = None
    ) -> Saved:
        """Renames everything into place, the fused ``.onnx`` last.

        Args:
            report: the content of ``report.json``.
            report_folder: where that goes; beside the output when None.
            page: the content of ``report.html``, which goes beside it; None for no page.

        Raises:
            UsageError: the output cannot be created.
            MissingHere: no space left.
        """
        target = self.output.parent
        report_path = (report_folder or target) / REPORT
        unfused = self.published_unfused
        with _as_user_errors(self.output):
            report_path.parent.mkdir(parents=True, exist_ok=True)
            old = _data_of(self.output) | _data_of(unfused_path(self.output))
            staged_report = self.folder / REPORT
            write_synced(staged_report, json.dumps(report, indent=2, default=str).encode() + b"\n")
            staged_page = self.folder / PAGE
            if page is not None:
                write_synced(staged_page, page.encode())
            with _all_or_nothing(self.folder) as move:
                if self.data is not None:
                    move(self.data, target / self.data.name)
                if unfused != self.unfused:
                    move(self.unfused, unfused)
                if page is not None:
                    move(staged_page, report_path.with_name(PAGE))
                move(staged_report, report_path)
                move(self.fused, self.output)
            _sync_folder(target)
        data = None if self.data is None else target / self.data.name
        used = _data_of(self.output) | _data_of(unfused_path(self.output)) | _data_of(unfused)
        for name in old - used:
            (target / name).unlink(missing_ok=True)
        return Saved(self.output, unfused, data, report_path)


def save(
    fused: ir.Model,
    unfused: Path,
    output: Path,
    report: Mapping[str, object],
    *,
    report_folder: Path | None = None,
    keep_unfused: bool = True,
) -> Saved:
    """Publishes ``fused`` as ``output``; ``staged`` and ``Staged.publish`` in one.

    Args:
        fused: the rewritten model; its weights may be memory-mapped from ``unfused``.
        unfused: the independent unfused ``.onnx``.
        output: where the fused ``.onnx`` goes; missing folders are made.
        report: the content of ``report.json``.
        report_folder: where ``report.json`` goes; beside ``output`` when None.
        keep_unfused: write the unfused twin beside ``output``; False where ``unfused`` is the user's own file.

    Raises:
        UsageError: the output cannot be created.
        MissingHere: no space left; the files that were there before are untouched.
    """
    with staged(fused, unfused, output, keep_unfused=keep_unfused) as files:
        return files.publish(report, report_folder)


@contextlib.contextmanager
def staged(fused: ir.Model, unfused: Path, output: Path, *, keep_unfused: bool = True) -> Iterator[Staged]:
    """Writes the models beside ``output`` without publishing them; what is not published is removed at the end.

    Weights go into one file that both models share when they are more than ``INLINE_LIMIT_BYTES`` or when the
    unfused model keeps its own outside.

    Raises:
        UsageError: the output cannot be created.
        MissingHere: no space left.
    """
    check_output(output)
    folder = output.parent / f".{output.name}.{socket.gethostname()}-{os.getpid()}.partial"
    try:
        with _as_user_errors(output):
            _remove_abandoned(output)
            folder.mkdir()
            files = _write_models(fused, unfused, output, folder, keep_unfused)
        yield files
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unfused_path(output: Path) -> Path:
    """``NAME.flash.onnx`` -> ``NAME.flash.unfused.onnx``."""
    return output.with_name(f"{output.stem}.unfused.onnx")


def written_paths(output: Path, report_folder: Path | None = None, *, keep_unfused: bool = True) -> list[Path]:
    """Every file that an export replaces, weights apart: those are named after their content."""
    folder = report_folder or output.parent
    twin = [unfused_path(output)] if keep_unfused else []
    return [output, *twin, folder / REPORT, folder / PAGE]


def check_output(output: Path) -> None:
    """Makes the output's folder and raises unless a file can be created there; cheap, so call it first.

    Raises:
        UsageError: a parent is a file, the output is a folder or device, or the folder is not writable.
    """
    with _as_user_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(output))
        if not os.access(output.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "Permission denied", str(output.parent))
    if output.exists() and not output.is_file():
        # A rename would put a plain file in the place of a pipe, or of the null device itself.
        raise UsageError(
            "the output is no plain file",
            where=str(output),
            got="a device, pipe or socket",
            need="a plain file, or a name that is free",
            do="give another path",
        )


def refuse_to_replace(read: Iterable[Path], written: Iterable[Path]) -> None:
    """Raises where a file of the source would be replaced by one that is written.

    Raises:
        UsageError: names that file.
    """
    sources = {path.resolve() for path in read}
    for path in written:
        if path.resolve() in sources:
            raise UsageError(
                "the output would replace the source",
                where=str(path),
                got="a file that the source is read from",
                need="another: what is read stays as it is",
                do="give the output, or the folder of the report, another name",
            )


def _write_models(fused: ir.Model, unfused: Path, output: Path, folder: Path, keep_unfused: bool) -> Staged:
    twin = ir.load(unfused)
    own, other = tensors_of(fused), tensors_of(twin)
    outside = any(isinstance(tensor, ir.ExternalTensor) for tensor in other)
    data = None
    if outside or sum(tensor.nbytes for tensor in own) > INLINE_LIMIT_BYTES:
        data = write_weights(own + other if keep_unfused else own, folder, output.stem)
    fused_path, twin_path = folder / output.name, folder / unfused_path(output).name
    write_model(fused, fused_path, data)
    if keep_unfused:
        write_model(twin, twin_path, data)
    path = None if data is None else data.path
    return Staged(fused_path, twin_path if keep_unfused else unfused, output, path, folder)


@contextlib.contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Callable[[Path, Path], None]]:
    """Gives ``move(source, target)``. Where a move fails, the targets of those before it are as they were."""
    done: list[tuple[Path, Path | None]] = []

    def move(source: Path, target: Path) -> None:
        kept = folder / f"old-{len(done)}" if target.exists() else None
        if kept is not None:
            _keep(target, kept)
        _move(source, target)
        done.append((target, kept))

    try:
        yield move
    except BaseException:
        for target, kept in reversed(done):
            if kept is None:
                target.unlink(missing_ok=True)
            else:
                _move(kept, target)
        raise


def _keep(target: Path, kept: Path) -> None:
    """A second name for what lies at ``target``; a copy where the file system has no links or it is another disk."""
    try:
        os.link(target, kept)
    except OSError:
        shutil.copy2(target, kept)


def _move(source: Path, target: Path) -> None:
    """Renames, also to another disk: written whole beside the target first."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            write_synced(beside, source.read_bytes())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """All is in place by now: where a folder cannot be synced, a power cut may still bring the old files back."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _data_of(path: Path) -> set[str]:
    """Names of our own weights' files that the model at ``path`` refers to; none where there is no such model."""
    if not path.is_file():
        return set()
    try:
        tensors = tensors_of(ir.load(path))
    except Exception:  # whatever lies there is about to be replaced and may be anything
        return set()
    names = {os.fspath(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    return {name for name in names if re.fullmatch(r"[^/\\]+\.[0-9a-f]{16}\.data", name)}


def _remove_abandoned(output: Path) -> None:
    """Removes the hidden folders of runs on this machine that were killed."""
    pattern = re.compile(re.escape(f".{output.name}.{socket.gethostname()}-") + r"(\d+)\.partial")
    for entry in output.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and (int(match[1]) == os.getpid() or not _alive(int(match[1]))):
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


@contextlib.contextmanager
def _as_user_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _user_error(error, output) from error


def _user_error(error: OSError, output: Path) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return MissingHere(
            "there is no space left for the output",
            where=str(output.parent),
            got=f"{error.strerror} (errno {error.errno})",
            need="room for the fused and the unfused model",
            do="free some space or give -o on another disk; the files that were there before are untouched",
        )
    return UsageError(
        "the output cannot be created",
        where=str(output),
        got=f"{error.strerror}: {error.filename or output}",
        need="a file in a folder that can be written",
        do="give another -o OUT.onnx",
    )
