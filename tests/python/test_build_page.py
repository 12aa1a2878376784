# SPDX-License-Identifier: Apache-2.0
"""What docs/api.md says of building from a program is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from python.attention_models import HEAD_DIM, HEADS, fused

from flash_trt.build import BuildOptions


@pytest.fixture(scope="module")
def section(repo_root: Path) -> str:
    page = (repo_root / "docs" / "api.md").read_text(encoding="utf-8")
    return page[page.index("## `flash_trt.build`") :].partition("\n## `Result`")[0]


def test_the_lines_on_the_page_build_an_engine_and_say_who_computes_its_attention(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fused(tmp_path / "model.flash.onnx")
    (lines,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    shape = f"query:1x{HEADS}x1x{HEAD_DIM},2x{HEADS}x37x{HEAD_DIM},3x{HEADS}x131x{HEAD_DIM}"
    assert "input_ids:1x1,4x128,16x512" in lines
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {}
    exec(lines.replace("input_ids:1x1,4x128,16x512", shape), known)
    sidecar = known["sidecar"]
    assert isinstance(sidecar, dict)
    said = capfd.readouterr()
    assert said.out == f"['plugin'] {sidecar['scratch_bytes']}\n"
    assert said.err == ""
    assert (tmp_path / "model.engine").is_file()
    assert (tmp_path / "model.engine.json").is_file()


def test_every_option_is_on_the_page(section: str) -> None:
    (listed,) = re.findall(r"those are: (.*?)\. `Talk", section, re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == [field.name for field in dataclasses.fields(BuildOptions)]
