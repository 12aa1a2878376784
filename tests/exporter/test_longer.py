# SPDX-License-Identifier: Apache-2.0
"""The check runs a model past its windows too: on shorter inputs a wrong one, or none, is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import graphs

from flash_export import pipeline
from flash_export.errors import NumbersDiffer
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.rewrite import rewrite
from flash_export.sites import Site
from flash_export.talk import Talk

WINDOW = 300
_BY_POSITIONS = "far = Sub (i, j)\n near = Less (far, w)\n past = LessOrEqual (j, i)\n keep = And (near, past)\n"
_TABLE = np.tri(640, dtype=bool) & ~np.tri(640, k=-WINDOW, dtype=bool)


def _model(*, table: bool) -> onnx.ModelProto:
    lines = "end = Reshape (columns, ax1)\n end2 = Concat <axis = 0> (end, end)\n"
    lines += "part = Slice (table, none, end2, both)\n keep = Cast <to = 9> (part)\n"
    body = graphs.LENGTHS + graphs.PRODUCT + (lines if table else _BY_POSITIONS)
    proto = graphs.model(
        body + "masked = Where (keep, scaled, hidden)\n" + graphs.REST,
        inputs=graphs.QKV.replace("T", "S") + (", bool[640, 640] table" if table else ""),
        constants=f"{graphs.CONSTANTS}, int64 w = {{{WINDOW}}}, int64[2] none = {{0, 0}}, int64[2] both = {{0, 1}}",
    )
    return graphs.holding(proto, table=_TABLE) if table else proto


def _lost(node: ir.Node) -> None:
    node.attributes["window_left"] = ir.AttrInt64("window_left", -1)


def _longer(node: ir.Node) -> None:
    node.attributes["window_left"] = ir.AttrInt64("window_left", WINDOW)


@pytest.mark.parametrize("table", [False, True], ids=["by positions", "in a table"])
@pytest.mark.parametrize("fault", [_lost, _longer])
def test_a_window_that_is_wrong_past_all_drawn_lengths_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[ir.Node], None], *, table: bool
) -> None:
    def wrong(model: ir.Model, sites: list[Site], *, fallback: bool) -> int:
        count = rewrite(model, sites, fallback=fallback)
        (node,) = (n for n in model.graph if n.domain == DOMAIN)
        assert node.attributes["window_left"].as_int() == WINDOW - 1
        fault(node)
        return count

    onnx.save(_model(table=table), tmp_path / "in.onnx")
    options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx")
    assert pipeline.run(options, Talk(quiet=True))
    monkeypatch.setattr(pipeline, "rewrite", wrong)
    with pytest.raises(NumbersDiffer):
        pipeline.run(options, Talk(quiet=True))
