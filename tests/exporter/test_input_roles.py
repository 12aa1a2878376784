# SPDX-License-Identifier: Apache-2.0
"""An input that is compared with positions is a length, and a scale that is off shows on what is drawn for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter.test_lengths import MASKS, graph

from flash_export import pipeline
from flash_export.draw import draw_inputs
from flash_export.input_roles import read_roles
from flash_export.options import Options
from flash_export.talk import Talk


@pytest.mark.parametrize("name", ["shown_before", "narrow_lengths", "other_way_round"])
def test_a_length_is_drawn_as_a_length(name: str) -> None:
    model = ir.from_proto(graph(MASKS[name]))
    assert (read_roles(model)["n"].kind, read_roles(model)["n"].limit) == ("index", 64)
    drawn = draw_inputs(model, {"B": 40, "S": 3, "T": 67})["n"]
    assert drawn.max() > 30
    assert len(np.unique(drawn)) > 10


def test_an_attention_with_lengths_is_proven(tmp_path: Path) -> None:
    onnx.save(graph(MASKS["shown_before"]), tmp_path / "in.onnx")
    options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx")
    result = pipeline.run(options, Talk(quiet=True))
    assert [s.status for s in result.sites] == ["fused"]
    assert result.sites[0].attributes is not None
    assert result.sites[0].attributes.has_kv_lengths == 1
