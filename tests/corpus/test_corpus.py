# SPDX-License-Identifier: Apache-2.0
"""Every cell of the corpus: as many attentions fused as before, right numbers, and no scale that may be off by 1 %."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus.cells import CELLS, measure, read_golden, sites_missed_when_scaled
from corpus.families import FAMILIES

SAMPLE = (
    "nanogpt.eager.legacy17",
    "nanogpt.eager.dynamo18",
    "bert.eager.legacy17",
    "bert.sdpa.dynamo23",
    "gpt2.sdpa.legacy17",
    "llama.sdpa.legacy17",
    "mistral.sdpa.dynamo18",
    "t5.eager.legacy17",
    "vit.ours.folder",
    "gemma2.ours.folder",
)
"""What every run of the tests takes; the mark ``corpus`` has the rest."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.corpus, id=n) for n in CELLS]
)
def test_a_cell_is_fused_as_before_and_right(name: str, tmp_path: Path) -> None:
    cell = CELLS[name]
    outcome = measure(cell, tmp_path)
    assert outcome.as_golden() == read_golden()[name], "scripts/coverage_table.py writes what is right now"
    if outcome.not_exported is None:
        assert outcome.fused + sum(outcome.refused.values()) == FAMILIES[cell.family].attentions
    if outcome.checked:
        assert sites_missed_when_scaled(cell, tmp_path) == set()


def test_the_golden_outcomes_are_those_of_the_cells() -> None:
    assert read_golden().keys() == CELLS.keys()


def test_every_attention_of_every_export_is_fused() -> None:
    assert {name: found["refused"] for name, found in read_golden().items() if found["refused"]} == {}


def test_every_export_is_checked() -> None:
    """Those too that run on a batch of one alone; what PyTorch cannot export is no file."""
    assert {n for n, found in read_golden().items() if found["checked"] is bool(found["not_exported"])} == set()


def test_our_own_export_takes_every_family() -> None:
    ours = {name: found for name, found in read_golden().items() if name.endswith(".folder")}
    assert len(ours) == sum(family.hugging_face for family in FAMILIES.values())
    assert {name for name, found in ours.items() if found["not_exported"] or found["not_run"]} == set()
