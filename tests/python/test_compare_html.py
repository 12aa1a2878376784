# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison says all that its JSON holds, loads nothing, and lets no name become markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporter.test_report_html import Page
from python.attention_models import flash_node, fused, unfused

from flash_export.errors import EXIT_NUMBERS_DIFFER, EXIT_OK, EXIT_USAGE
from flash_trt.compare_html import as_html

HOSTILE = ["</title><script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "{{ 7 * 7 }}"]


def verdict(output: str = "hidden", kind: str = "passed", **changes: Any) -> dict[str, Any]:
    """One verdict as the JSON holds it."""
    usual = {"run": "seq=67", "why": "", "max_abs_error": 2e-6, "tolerance": 4e-6, "largest": 1.5, "compared": 1234}
    return {**usual, "output": output, "kind": kind, **changes}


def document(*verdicts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A comparison as ``flash-trt compare --json`` writes it."""
    outputs = list(verdicts) or [verdict()]
    usual = {
        "schema": 1,
        "passed": all(v["kind"] == "passed" for v in outputs),
        "fused": "m.flash.onnx",
        "reference": "m.unfused.onnx",
        "precision": "as they stand",
        "seed": 7,
        "runs": 1,
        "inputs": {},
        "outputs": outputs,
    }
    return usual | changes


DIFFERS = verdict("logits", "differs", why="max |difference| 0.5 (at [0])", max_abs_error=0.5)
MISSING = verdict("lse", "missing", why="FUSED has no output of this name", max_abs_error=None, compared=0)


def test_a_pass_says_so_with_its_numbers() -> None:
    text = Page(as_html(document())).text
    for words in (
        "Every output agrees with m.unfused.onnx",
        "hidden",
        "2e-06",
        "4e-06",
        "1.5",
        "1,234",
        "50 %",
        "seed 7",
    ):
        assert words in text
    assert "What fails" not in text


def test_each_failure_stands_with_its_reason_and_how_to_replay_it() -> None:
    made = document(verdict(), DIFFERS, MISSING, inputs={"seq=67": "runs/inputs-00.npz"})
    text = Page(as_html(made)).text
    assert "2 of 3 compared outputs fail" in text
    for words in (DIFFERS["why"], MISSING["why"], "differs", "missing", "--values runs/inputs-00.npz"):
        assert words in text
    assert "agrees with" not in text


def test_a_failed_run_is_no_bar_among_those_that_passed() -> None:
    bars = re.findall(r"(\d+) model run\(s\) at (\d+)", as_html(document(verdict(), DIFFERS, MISSING)))
    assert bars == [("1", "50")]


def test_a_comparison_of_nothing_is_no_pass() -> None:
    empty = verdict(kind="empty", max_abs_error=0.0, tolerance=0.0, compared=0)
    text = Page(as_html(document(empty, passed=False))).text
    assert "Nothing was compared" in text
    assert "agrees with" not in text


def test_the_worst_run_of_an_output_is_shown() -> None:
    runs = [verdict(run="seq=1"), verdict(run="seq=131", max_abs_error=3e-6), verdict(run="seq=0", kind="empty")]
    assert "seq=131 (of 3)" in Page(as_html(document(*runs))).text


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    made = as_html(document(verdict(), DIFFERS))
    page = Page(made)
    loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
    assert not [tag for tag, attributes in page.tags if loading & attributes.keys()]
    assert not {"script", "link", "iframe", "object", "embed", "img"} & {tag for tag, _ in page.tags}
    assert not re.search(r"url\(|@import|https?:", made)
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def named(name: str) -> dict[str, Any]:
    """A comparison in which every text that is not a fixed word is ``name``."""
    outputs = [verdict(name, run=name), verdict(name, "differs", run=name, why=name)]
    return document(*outputs, fused=name, reference=name, precision=name, inputs={name: name})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_text(name: str) -> None:
    page = Page(as_html(named(name)))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in Page(as_html(named("name"))).tags]
    assert name in page.text


# --- from the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "code"), [({}, EXIT_OK), ({"causal": 0}, EXIT_NUMBERS_DIFFER)])
def test_the_command_draws_the_page_from_its_json(
    tmp_path: Path, flash_trt: Callable[..., int], changes: dict[str, int], code: int
) -> None:
    pair = fused(tmp_path / "f.onnx", flash_node(**changes)), unfused(tmp_path / "u.onnx")
    written, page = tmp_path / "v.json", tmp_path / "deep" / "v.html"
    assert flash_trt("compare", *pair, "--repeats", 1, "--json", written, "--html", page) == code
    assert page.read_text() == as_html(json.loads(written.read_text()))


def test_the_page_is_written_where_nothing_was_compared(tmp_path: Path, flash_trt: Callable[..., int]) -> None:
    values, page = tmp_path / "values.npz", tmp_path / "v.html"
    np.savez(values, **{name: np.zeros((0, 3, 5, 20), np.float32) for name in ("query", "key", "value")})
    pair = fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")
    assert flash_trt("compare", *pair, "--values", values, "--html", page) == EXIT_USAGE
    assert "Nothing was compared" in Page(page.read_text()).text


def test_the_page_does_not_replace_a_model(tmp_path: Path, flash_trt: Callable[..., int]) -> None:
    pair = fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")
    before = pair[0].read_bytes()
    assert flash_trt("compare", *pair, "--html", pair[0]) == EXIT_USAGE
    assert pair[0].read_bytes() == before
