# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flash_trt import gpu

SCRIPT = Path(__file__).parent / "text_generation.py"


@pytest.mark.xdist_group("text_generation")
def test_the_fused_model_chooses_the_64_tokens_that_pytorch_chooses(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr, "a library's progress bar among the steps"
    assert "our CPU operator in ONNX Runtime: 64 tokens, each as PyTorch chose it" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fused"] == 2
    _require_engine(json.loads((tmp_path / "model.engine.json").read_text()))
    here = [device.sm for device in gpu.devices()][:1]
    served = bool(here) and here[0] in ("sm80", "sm86", "sm89", "sm120")
    last = "the TensorRT plugin, in the engine: 64 tokens" if served else "No GPU of sm80,sm86,sm89,sm120 here."
    assert last in done.stdout.splitlines()[-1]
    assert {(site["q_heads"], site["kv_heads"], site["causal"]) for site in report["sites"]} == {(4, 2, "bottom_right")}


def _require_engine(sidecar: dict) -> None:
    assert [layer["operator"] for layer in sidecar["plugin_layers"]] == ["FlashAttentionEx"] * 2
    assert sidecar["plan_proof"] == "fields"
    mask = sidecar["profile"]["attention_mask"]  # past + seq, at 1 to 64 new tokens behind 0 to 192
    assert (mask["min"], mask["opt"], mask["max"]) == ([1, 1], [1, 65], [1, 256])
