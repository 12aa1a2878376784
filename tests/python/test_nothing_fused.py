# SPDX-License-Identifier: Apache-2.0
"""``flash-trt build`` of a file with nothing fused does not send back to flash-export whoever comes from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from python.attention_models import unfused

from flash_export import dim_ranges
from flash_export.errors import EXIT_UNSUPPORTED

Command = Callable[..., int]


@pytest.mark.parametrize("of_ours", [True, False])
def test_the_way_out_names_the_report_and_the_flag_that_ends_earlier(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], of_ours: bool
) -> None:
    model = unfused(tmp_path / "m.flash.onnx")
    if of_ours:
        dim_ranges.write(model, {"batch": (1, 8)})
    assert flash_trt("build", model, "--target", "sm80") == EXIT_UNSUPPORTED
    do = " ".join(capsys.readouterr().err.split()).partition(" do ")[2]
    for words in ("report.json", "--require-all", "--allow-none"):
        assert words in do
    assert do.strip().startswith("flash-export wrote it" if of_ours else "run flash-export on it;")
