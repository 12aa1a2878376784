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
    """Gives the report in ``folder``, where it is of a model of another name than ``output``, that name as well.

    Nothing is moved or removed: a kill at any moment leaves what was there, with or without the second name.

    Raises:
        OSError: a file cannot be written.
    """
    stem = _model_of(folder / REPORT)
    if stem in (None, output.stem):
        return
    for name in (PAGE, REPORT):
        if (folder / name).is_file():
            part = folder / f".{stem}.{name}.part"
            write_synced(part, (folder / name).read_bytes())
            part.replace(folder / f"{stem}.{name}")


def drop_kept(folder: Path, output: Path) -> None:
    """Removes what was kept aside of ``output``'s own earlier report, now that ``report.json`` is its report again."""
    for name in (REPORT, PAGE):
        with contextlib.suppress(OSError):
            (folder / f"{output.stem}.{name}").unlink(missing_ok=True)


def _model_of(report: Path) -> str | None:
    """The name, without its suffix, of the model that a report says it is of; None where there is no report of ours."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        stem = PurePath(json.loads(report.read_bytes())["output"]).stem
        return stem if stem.strip(".") and stem.isprintable() else None
    return None
