# SPDX-License-Identifier: Apache-2.0
"""Where the unfused model is NaN, "proven" comes with a warning of how much was not compared."""

from __future__ import annotations

import html
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exporter import graphs

import flash_export
from flash_export.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")


class Padded(torch.nn.Module):
    """Causal self-attention of two heads under a padding mask."""

    def __init__(self, guard: bool) -> None:
        super().__init__()
        self.project, self.guard = torch.nn.Linear(8, 24), guard

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.project(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        steps = torch.arange(length)
        visible = (steps[:, None] >= steps[None, :]) & mask[:, None, None, :].bool()
        scores = (q @ k.transpose(-1, -2) / math.sqrt(4)).masked_fill(~visible, -torch.inf)
        probs = scores.softmax(-1)
        if self.guard:
            probs = probs.masked_fill(probs.isnan(), 0)
        return (probs @ v).transpose(1, 2).reshape(batch, length, 8)


DIMS = {"x": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}


def _inputs() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, :3] = 0  # left padding: three rows that see no key
    return {"x": torch.randn(3, 7, 8), "mask": mask}


def test_rows_that_the_model_makes_nan_are_counted_and_told_in_every_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Padded(guard=False).eval(), _inputs()
    np.savez(tmp_path / "v.npz", **{name: value.numpy() for name, value in inputs.items()})
    result = flash_export.export(
        model, inputs, dynamic_shapes=DIMS, output=tmp_path / "m.onnx", values=tmp_path / "v.npz"
    )
    count = int(model(**inputs).isnan().sum())
    assert count == 3 * 8
    (told,) = [w for w in result.warnings if "NaN" in w]
    assert f"NaN in {count} of {3 * 7 * 8} numbers" in told
    assert "1 of 1 sets of inputs" in told
    assert "not compared" in told
    assert "a boolean mask to scaled_dot_product_attention brings a guard" in told
    assert told in result.report["check"]["warnings"]
    page = html.unescape((tmp_path / "report.html").read_text())
    assert told in page


def test_drawn_padding_finds_it_too_and_a_guard_ends_it() -> None:
    for guard in (False, True):
        torch.manual_seed(0)
        result = flash_export.export(Padded(guard).eval(), _inputs(), dynamic_shapes=DIMS)
        assert len(result.fused) == 1
        assert any("is NaN in" in w for w in result.warnings) is not guard


def test_nan_of_another_origin_is_not_laid_to_padding() -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 18]>
        main (float[B, 2, S, 4] q, float[B, 2, S, 4] k, float[B, 2, S, 4] v) => (float[B, 2, S, 4] out)
        <float one = {1.0}>
        {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            scores = MatMul (q, kt)
            probs = Softmax <axis = -1> (scores)
            mixed = MatMul (probs, v)
            out = Log (mixed)
        }
    """
    result = flash_export.rewrite(onnx.parser.parse_model(text))
    (told,) = [w for w in result.warnings if "is NaN in" in w]
    assert "outside attention" in told
    assert "padding" not in told


def test_truths_made_of_rows_without_a_key_prove_nothing_and_are_no_difference() -> None:
    """NaN >= 0 is false, and 0 >= 0 is true."""
    lines = "past = LessOrEqual (j, i)\n keep = And (past, pad)\n masked = Where (keep, scaled, hidden)\n"
    end = "probs = Softmax <axis = -1> (masked)\n o = MatMul (probs, v)\n out = GreaterOrEqual (o, zero)\n"
    proto = graphs.model(
        graphs.LENGTHS + graphs.PRODUCT + lines + end,
        inputs=graphs.QKV.replace("T", "S") + ", bool[B, 1, 1, S] pad",
        outputs="bool[B, 4, S, 8] out",
    )
    with pytest.raises(UsageError, match=r"rows without a key(.|\n)*--values"):
        flash_export.rewrite(proto)
