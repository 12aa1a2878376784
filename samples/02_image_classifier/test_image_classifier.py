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


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("image_classifier")
    command = [sys.executable, str(SCRIPT), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr, "a library's progress bar among the steps"
    return out, done.stdout


@pytest.mark.xdist_group("image_classifier")
def test_a_trained_vit_is_fused_labels_as_pytorch_does_and_becomes_an_engine(sample: tuple[Path, str]) -> None:
    out, said = sample
    told = re.search(r"model\.onnx: (\d+)% of 64 new images right, every label as in PyTorch", said)
    assert told is not None
    assert int(told[1]) >= 90
    assert json.loads((out / "report.json").read_text())["fused"] == 3
    sidecar = json.loads((out / "model.engine.json").read_text())
    assert [found["by"] for found in sidecar["attention"]] == ["plugin"] * 3
    assert ("model.engine: " in said) is not ("The engine is not run here: " in said)


@pytest.mark.gpu
@pytest.mark.xdist_group("image_classifier")
def test_on_a_gpu_the_engine_labels_as_pytorch_does(sample: tuple[Path, str]) -> None:
    assert re.search(r"model\.engine: \d+% of 64 new images right, every label as in PyTorch", sample[1])
