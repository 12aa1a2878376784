# SPDX-License-Identifier: Apache-2.0
"""A rewrite that goes wrong by a factor in one scale, put into the whole command."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from flash_export import pipeline
from flash_export.errors import NumbersDiffer
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.rewrite import rewrite
from flash_export.sites import Site
from flash_export.talk import Talk


def run_scaled(folder: Path, fault: float, patch: pytest.MonkeyPatch, *, at: int = 0) -> pipeline.Result | None:
    """The command on ``in.onnx`` in ``folder`` with the ``at``-th node's scale times ``fault``.

    With another fault than 1 it has to fail, and there is no result.
    """

    def scaled(model: ir.Model, sites: list[Site], *, fallback: bool) -> int:
        count = rewrite(model, sites, fallback=fallback)
        node = [n for n in model.graph if n.domain == DOMAIN][at]
        node.attributes["scale"] = ir.AttrFloat32("scale", fault * node.attributes["scale"].as_float())
        return count

    patch.setattr(pipeline, "rewrite", scaled)
    options = Options(source=folder / "in.onnx", output=folder / "out.onnx")
    if fault != 1.0:
        with pytest.raises(NumbersDiffer):
            pipeline.run(options, Talk(quiet=True))
        return None
    return pipeline.run(options, Talk(quiet=True))
