# SPDX-License-Identifier: Apache-2.0
"""The report of a folder is that of its latest export; the report of another model that lies there is kept aside.

``report.json`` is where tools look right after an export, whatever the model is called. A folder may hold several
models: before the report of one takes the place of another's, that one gets a second name, ``NAME.report.json`` for
``NAME.onnx``, and so does its page.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path, PurePath

from flash_export.save_weights import write_synced

REPORT = "report.json"
PAGE = "report.html"


def is_report(path: Path) -> bool:
    """Whether ``path`` has the name of a report, kept aside or not."""
    return path.name == REPORT or path.name.endswith(f".{REPORT}")


def keep_others(folder: Path, output: Path) -> None:
    """Gives the report in ``folder``, where it is of another model than ``output``, that one's name as well.

    Nothing is moved or removed: a kill at any moment leaves what was there, with or without the second name. A file of
    that name that is no report of ours stays what it is.

    Raises:
        OSError: a file cannot be written.
    """
    model = _model_of(folder / REPORT)
    if model is None or _same(model, output):
        return
    kept = folder / f"{model.stem}.{REPORT}"
    if kept.exists() and _model_of(kept) is None:
        return
    for name in (PAGE, REPORT):
        if (folder / name).is_file():
            part = folder / f".{model.stem}.{name}.part"
            write_synced(part, (folder / name).read_bytes())
            part.replace(folder / f"{model.stem}.{name}")


def drop_kept(folder: Path, output: Path) -> None:
    """Removes what was kept aside of ``output``'s own earlier report, now that ``report.json`` is its report again."""
    model = _model_of(folder / f"{output.stem}.{REPORT}")
    if model is None or not _same(model, output):
        return
    for name in (REPORT, PAGE):
        with contextlib.suppress(OSError):
            (folder / f"{output.stem}.{name}").unlink(missing_ok=True)


def replaced(folder: Path, output: Path, source: Path) -> str | None:
    """A line on the file at ``output`` where it is there and is no earlier export of ``source``; None otherwise.

    Asked before the export is published. What lies there is told from the reports in ``folder``.
    """
    if not output.is_file():
        return None
    for report in (folder / REPORT, folder / f"{output.stem}.{REPORT}"):
        model = _model_of(report)
        if model is not None and _same(model, output):
            was = _source_of(report)
            known = was is not None and _may_be(was, source)
            return None if known else f"{output.name} has replaced the export of {was or 'another source'}"
    return f"{output.name} has replaced a file of that name"


def _source_of(report: Path) -> PurePath | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        source = PurePath(json.loads(report.read_bytes())["source"])
        return source if str(source).isprintable() else None
    return None


def _may_be(was: PurePath, source: Path) -> bool:
    """Whether a source written down earlier, maybe from a folder nobody knows, can be ``source``."""
    known, now = [part for part in was.parts if part not in ("..", ".")], source.resolve().parts
    return Path(was).resolve() == source.resolve() if was.is_absolute() else list(now[len(now) - len(known) :]) == known


def _same(model: PurePath, output: Path) -> bool:
    """Whether a report's path is ``output``; one that was written down from a folder nobody knows has but its name."""
    return Path(model).resolve() == output.resolve() if model.is_absolute() else model.name == output.name


def _model_of(report: Path) -> PurePath | None:
    """The model that a report says it is of; None where there is no report of ours."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        model = PurePath(json.loads(report.read_bytes())["output"])
        return model if model.stem.strip(".") and str(model).isprintable() else None
    return None
