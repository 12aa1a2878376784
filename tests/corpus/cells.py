# SPDX-License-Identifier: Apache-2.0
"""One cell of the corpus: a family, a way its attention is written, and an exporter; and what becomes of it.

``measure`` takes a cell the whole way: export, ``flash-export``'s own pipeline with its check, and what the fused file
gives on padded inputs beside PyTorch. The tests compare its outcome with ``golden.json``; ``scripts/coverage_table.py``
writes that file and the table of ``docs/coverage.md``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import onnx_ir as ir
from corpus import padding
from corpus.families import FAMILIES, INPUTS, Adapter, Family, Sizes, adapter
from exporter.torch_exports import EXPORTERS, Wrapped, export

from flash_export import pipeline
from flash_export.errors import NumbersDiffer, UsageError
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.rewrite import rewrite
from flash_export.sites import Site
from flash_export.talk import Talk

GOLDEN = Path(__file__).with_name("golden.json")
FOLDER = "folder"
"""The exporter that is ours: the family saved as a Hugging Face folder and given to ``flash-export``."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One export of the corpus. ``implementation`` is ``ours`` where flash-export sets the attention itself."""

    family: str
    implementation: str
    exporter: str

    @property
    def name(self) -> str:
        return f"{self.family}.{self.implementation}.{self.exporter}"


def _cells() -> list[Cell]:
    cells = []
    for family in FAMILIES.values():
        cells += [Cell(family.name, i, e) for i in family.implementations for e in EXPORTERS]
        if family.hugging_face:
            cells.append(Cell(family.name, "ours", FOLDER))
    return cells


CELLS = {cell.name: cell for cell in _cells()}


class CannotExport(Exception):
    """PyTorch has no ONNX for this cell; the message is PyTorch's reason in one line."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Args:
        fused: attentions that became FlashAttention nodes.
        refused: reason code -> how many.
        not_exported: why PyTorch cannot export it; None as a rule.
        not_run: why ONNX Runtime does not run PyTorch's own, unfused export on a batch of two; None as a rule.
        checked: whether flash-export's own check ran, and so proved the fused file.
        max_error: largest difference from PyTorch in float64, valid tokens only; None where nothing ran.
        seconds: time of PyTorch's export, and of everything after it.
    """

    fused: int
    refused: dict[str, int]
    not_exported: str | None = None
    not_run: str | None = None
    checked: bool = False
    max_error: float | None = None
    seconds: tuple[float, float] = (0.0, 0.0)

    def as_golden(self) -> dict[str, object]:
        """What must not change without notice: everything but errors and times."""
        return {
            "fused": self.fused,
            "refused": self.refused,
            "not_exported": self.not_exported,
            "not_run": self.not_run,
            "checked": self.checked,
        }


def read_golden() -> dict[str, dict[str, object]]:
    """Cell name -> ``Outcome.as_golden`` as it was last accepted."""
    golden: dict[str, dict[str, object]] = json.loads(GOLDEN.read_text())
    return golden


def measure(cell: Cell, folder: Path) -> Outcome:
    """Takes a cell the whole way, in ``folder``.

    Raises:
        AssertionError: the fused file is wrong on padded inputs.
        NumbersDiffer: flash-export's own check fails.
    """
    family = FAMILIES[cell.family]
    model = adapter(family, family.implementations[-1] if cell.exporter == FOLDER else cell.implementation)
    start = time.monotonic()
    try:
        source = _export(cell, family, model, folder)
    except CannotExport as error:
        return Outcome(0, {}, not_exported=str(error))
    exported = time.monotonic()
    output = folder / f"{cell.name}.flash.onnx"
    options = Options(source=source, output=output, report=folder, allow_none=True)
    talk = Talk(silent=True)
    try:
        report = pipeline.run(options, talk).report
    except UsageError as error:
        if not error.what.startswith("the unfused model runs on none"):
            raise
        report = pipeline.run(dataclasses.replace(options, check=False), talk).report
    finished = time.monotonic()
    sites = report["sites"]
    assert isinstance(sites, list)
    not_run = why_not_run(Path(str(report["unfused"])), family)
    error = None
    if report["check"] is not None:
        error = padding.assert_right_on_valid_tokens(output, family, model, single=not_run is not None)
    return Outcome(
        fused=sum(s["status"] == "fused" for s in sites),
        refused=dict(Counter(s["reason"]["code"] for s in sites if s["status"] == "refused")),
        not_run=not_run,
        checked=report["check"] is not None,
        max_error=error,
        seconds=(exported - start, finished - exported),
    )


def why_not_run(unfused: Path, family: Family) -> str | None:
    """Why ONNX Runtime does not run a file that PyTorch wrote; None where it does."""
    try:
        padding.run(unfused, family, family.draw(Sizes()))
    except Exception as error:  # each kind of failure has a type of its own
        return _one_line(re.sub(r"^.*(Status Message|Type Error): ", "", str(error), flags=re.DOTALL))
    return None


def _export(cell: Cell, family: Family, model: Adapter, folder: Path) -> Path:
    if cell.exporter == FOLDER:
        path = folder / cell.name
        model.model.save_pretrained(path)
        return path
    path = folder / f"{cell.name}.onnx"
    try:
        export(Wrapped(model).eval(), family.draw(Sizes()), path, cell.exporter, [INPUTS[n][1] for n in family.inputs])
    except Exception as error:  # the exporters raise many types; each is a model that they cannot export
        raise CannotExport(_one_line(str(_deepest(error)))) from error
    return path


def _deepest(error: BaseException) -> BaseException:
    """What the first of a chain of errors said; the dynamo exporter wraps it several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(text: str) -> str:
    """The first line of an error, names of nodes and values left out: they change with every version."""
    return re.sub(r"\([^)]*\)|'[^']*/[^']*'", "(...)", text.strip().splitlines()[0])[:120]


def sites_missed_when_scaled(cell: Cell, folder: Path) -> set[str]:
    """The fused sites whose check stays quiet although the scale of every node is 1 % too large.

    For a cell that ``measure`` took in the same folder.
    """
    source = folder / f"{cell.name}.onnx"
    if not source.exists():
        source = folder / f"{cell.name}.flash.unfused.onnx"
    fused: set[str] = set()

    def scaled(model: ir.Model, sites: Sequence[Site], *, fallback: bool) -> int:
        count = rewrite(model, sites, fallback=fallback)
        fused.update(site.name for site in sites if site.status == "fused")
        for node in model.graph:
            if node.domain == DOMAIN:
                node.attributes["scale"] = ir.AttrFloat32("scale", 1.01 * node.attributes["scale"].as_float())
        return count

    options = Options(source=source, output=folder / "scaled.onnx", report=folder)
    with mock.patch.object(pipeline, "rewrite", scaled):
        try:
            pipeline.run(options, Talk(silent=True))
        except NumbersDiffer as error:
            return fused - set(re.sub(r" of \d+$", "", error.where.removeprefix("site ")).split(", "))
    return fused
