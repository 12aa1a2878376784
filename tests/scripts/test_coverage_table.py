# SPDX-License-Identifier: Apache-2.0
"""The page of coverage says what the golden outcomes say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from corpus.cells import read_golden
from corpus.families import FAMILIES


@pytest.fixture(scope="module")
def table(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_table", repo_root / "scripts" / "coverage_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def columns(line: str, first: int, last: int) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")][first:last]


def test_the_page_has_the_golden_counts_of_every_cell(table: ModuleType, repo_root: Path) -> None:
    lines = (repo_root / "docs" / "coverage.md").read_text().splitlines()
    rows = {".".join(columns(line, 0, 3)): columns(line, 3, 6) for line in lines if line.count("|") == 9}
    for name, outcome in read_golden().items():
        expected = table.row(name, outcome, FAMILIES[name.split(".")[0]].attentions)
        assert rows[name] == columns(expected, 3, 6)


def test_a_refusal_and_a_failed_export_are_in_the_row(table: ModuleType) -> None:
    refused = {"fused": 1, "refused": {"sink": 1}, "not_exported": None, "not_run": None, "max_error": 1.2e-6}
    assert table.row("a.b.c", refused | {"seconds": (1.5, 0.25)}, 2) == (
        "| a | b | c | 2 | 1 | 1 `sink` | 1.2e-06 | 1.5 + 0.2 |"
    )
    failed = {"fused": 0, "refused": {}, "not_exported": "no diff", "not_run": None}
    assert table.row("a.b.c", failed, 2) == "| a | b | c | 2 | - | PyTorch cannot export it: no diff |  |  |"


def test_the_total_leaves_out_what_pytorch_cannot_export(table: ModuleType) -> None:
    whole = {"fused": 2, "refused": {}, "not_exported": None, "not_run": None}
    failed = whole | {"fused": 0, "not_exported": "no diff"}
    page = table.page({"a.x.y": whole, "a.x.z": failed}, {"a": 2})
    assert "**2 of 2 attentions in 1 exports are fused.**" in page


def test_what_stands_below_the_table_is_the_script_s_own(table: ModuleType, repo_root: Path) -> None:
    """Or else the next measurement takes it away."""
    assert (repo_root / "docs" / "coverage.md").read_text().endswith(table.BEYOND)
