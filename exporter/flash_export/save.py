# SPDX-License-Identifier: Apache-2.0
"""Step 6: the fused model, its unfused twin, their weights and the report appear together, or nothing does.

Everything is written into a hidden folder beside the output and synced to disk; one rename there makes it the export
(``save_commit``). A full disk or a kill before that leaves the files that were there before, a kill after it the new
ones:

- the weights' file is named after its content, so that new weights never replace those an older ``.onnx`` refers to;
- the fused ``.onnx`` is moved last; weights that nothing refers to any more go after it;
- a report that goes to another folder follows by a commit of its own;
- the report of another model is kept under that one's name first (``save_report``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx_ir as ir

from flash_export import interrupt
from flash_export.errors import MissingHere, UsageError, UserError
from flash_export.save_commit import WEIGHTS, commit, hidden_folder
from flash_export.save_report import PAGE, REPORT, drop_kept, keep_others
from flash_export.save_weights import tensors_of, write_model, write_synced, write_weights

INLINE_LIMIT_BYTES = 100 * 1000 * 1000
"""Weights above this lie in a file of their own: protobuf ends at 2 GB, and a big file is slow to parse."""


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
        target, unfused = self.output.parent, self.published_unfused
        place = report_folder or target
        pages = {} if page is None else {PAGE: page.encode()}
        pages[REPORT] = json.dumps(report, indent=2, default=str).encode() + b"\n"
        staged_twin = [] if unfused == self.unfused else [self.unfused.name]
        staged_data = [] if self.data is None else [self.data.name]
        with interrupt.held(), _as_user_errors(self.output), contextlib.ExitStack() as stack:
            place.mkdir(parents=True, exist_ok=True)
            apart = place.resolve() != target.resolve()
            folder = stack.enter_context(hidden_folder(place / REPORT)) if apart else self.folder
            for name, content in pages.items():
                write_synced(folder / name, content)
            keep_others(place, self.output)
            unused = self._unused_weights()
            beside = [] if apart else list(pages)
            commit(self.folder, [*staged_data, *staged_twin, *beside, self.output.name], unused)
            if apart:
                commit(folder, pages)
            drop_kept(place, self.output)
        data = None if self.data is None else target / self.data.name
        return Saved(self.output, unfused, data, place / REPORT)

    def _unused_weights(self) -> set[str]:
        """Weights' files beside the output that nothing will refer to once this is published."""
        twin = unfused_path(self.output)
        stays = set() if self.published_unfused == twin else _data_of(twin)
        return (_data_of(self.output) | _data_of(twin)) - _data_of(self.fused) - _data_of(self.unfused) - stays


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
    with contextlib.ExitStack() as stack:
        with _as_user_errors(output):
            folder = stack.enter_context(hidden_folder(output))
            files = _write_models(fused, unfused, output, folder, keep_unfused)
        yield files


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


def check_name(output: Path) -> None:
    """Raises unless the output is called an ONNX file: any other suffix promises another format.

    Raises:
        UsageError: names the suffix.
    """
    elsewhere = output.exists() and not output.is_file()  # of which ``check_output`` says more
    if output.suffix.lower() != ".onnx" and not elsewhere:
        raise UsageError(
            "the output has not the name of an ONNX file",
            where=str(output),
            got=f"the suffix {output.suffix}" if output.suffix else "no suffix",
            need="a name that ends in .onnx, by which runtimes and tools tell the format",
            do=f"give {output.with_suffix('.onnx')}: flash-export writes ONNX and nothing else",
        )


def refuse_to_replace(read: Iterable[Path], written: Iterable[Path]) -> None:
    """Raises where a file of the source would be replaced by one that is written.

    Raises:
        UsageError: names that file.
    """
    # realpath: Path.resolve raises at a link to itself, which a rename replaces like any other link.
    sources = {os.path.realpath(path) for path in read}
    for path in written:
        if os.path.realpath(path) in sources:
            raise UsageError(
                "the output would replace the source",
                where=str(path),
                got="a file that the source is read from",
                need="another: what is read stays as it is",
                do="give the output, or the folder of the report, another name",
            )


def _write_models(fused: ir.Model, unfused: Path, output: Path, folder: Path, keep_unfused: bool) -> Staged:
    twin = ir.load(unfused, format="protobuf")
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


def _data_of(path: Path) -> set[str]:
    """Names of our own weights' files that the model at ``path`` refers to; none where there is no such model."""
    if not path.is_file():
        return set()
    try:
        tensors = tensors_of(ir.load(path, format="protobuf"))
    except Exception:  # whatever lies there is about to be replaced and may be anything
        return set()
    names = {os.fspath(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    return {name for name in names if WEIGHTS.fullmatch(name)}


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
        do="give the output another path",
    )
