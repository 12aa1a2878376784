# SPDX-License-Identifier: Apache-2.0
"""A site tells whether a pattern of the user's own has made it, and the check sends its faults to that pattern."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import onnx.parser
import onnx_ir as ir
import pytest
from exporter import small_models

from flash_export import pipeline
from flash_export.canonical import Attention
from flash_export.errors import NumbersDiffer
from flash_export.find import find
from flash_export.options import Options
from flash_export.own_sites import pattern_of
from flash_export.patterns import PATTERNS, softmax
from flash_export.region import Region
from flash_export.sites import Site


def wrong(anchor: ir.Node, region: Region, factor: float = 1.5) -> Attention:
    read = softmax.read(anchor, region)
    return dataclasses.replace(read, scale=read.scale * factor)


def site_of() -> Site:
    (site,) = find(ir.from_proto(onnx.parser.parse_model(small_models.ATTENTION)))
    return site


def test_a_site_of_a_pattern_of_ours_has_no_module() -> None:
    assert pattern_of(site_of()) == ""
    assert pattern_of(Site("refused", "refused")) == ""


@pytest.mark.parametrize("reader", [wrong, functools.partial(functools.partial(wrong), factor=2.0)])
def test_a_site_of_an_own_pattern_has_its_module(monkeypatch: pytest.MonkeyPatch, reader: object) -> None:
    monkeypatch.setitem(PATTERNS, ("", "Softmax"), reader)
    assert pattern_of(site_of()) == wrong.__module__


@pytest.mark.parametrize("own", [True, False])
def test_numbers_that_differ_by_an_own_pattern_are_corrected_in_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    if not own:
        monkeypatch.setattr(wrong, "__module__", "flash_export.patterns.softmax")
    monkeypatch.setitem(PATTERNS, ("", "Softmax"), wrong)
    source = small_models.write(small_models.ATTENTION, tmp_path / "in.onnx")
    with pytest.raises(NumbersDiffer) as caught:
        pipeline.run(Options(source=source, output=tmp_path / "out.onnx", quiet=True))
    mend = f"correct the reader in {wrong.__module__}" if own else "please report the model"
    assert caught.value.do == f"leave it as standard ONNX with --skip probs, and {mend}"
