# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "text_generation.py"


@pytest.mark.xdist_group("text_generation")
def test_the_fused_model_chooses_the_64_tokens_that_pytorch_chooses(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "64 tokens, each as PyTorch chose it" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fused"] == 2
    assert {(site["q_heads"], site["kv_heads"], site["causal"]) for site in report["sites"]} == {(4, 2, "bottom_right")}
