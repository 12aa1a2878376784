# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "image_classifier.py"


@pytest.mark.xdist_group("image_classifier")
def test_a_trained_vit_is_fused_labels_as_pytorch_does_and_becomes_an_engine(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr, "a library's progress bar among the steps"
    told = re.search(r"model\.onnx: (\d+)% of 64 new images right, every label as in PyTorch", done.stdout)
    assert told is not None
    assert int(told[1]) >= 90
    assert json.loads((tmp_path / "report.json").read_text())["fused"] == 3
    sidecar = json.loads((tmp_path / "model.engine.json").read_text())
    assert [found["by"] for found in sidecar["attention"]] == ["plugin"] * 3
