# SPDX-License-Identifier: Apache-2.0
"""A model of 2.5 GB is exported, proven and saved in less memory than 1.5 times its weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
from end_to_end import big_model

from flash_export.load_onnx import verify

SIZE_BYTES = 2_500_000_000
SMALL_BYTES = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: pytest keeps those of three runs."""
    free = shutil.disk_usage(tmp_path).free
    if free < 2 * SIZE_BYTES:
        pytest.skip(f"{free / 1e9:.1f} GB of disk are free, the model and its export need {2 * SIZE_BYTES / 1e9:.0f}")
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_a_big_model_is_proven_and_saved_in_less_than_one_and_a_half_times_its_weights(folder: Path) -> None:
    source, output = big_model.write_model(folder, SIZE_BYTES), folder / "out" / "big.flash.onnx"
    child = subprocess.run(
        [sys.executable, big_model.__file__, str(source), str(output)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    weights = source.with_name("big.onnx.data").stat().st_size
    assert weights > 0.99 * SIZE_BYTES
    assert int(child.stdout.splitlines()[-1]) < 1.5 * weights

    report = json.loads(output.with_name("report.json").read_text())
    assert (report["fused"], report["refused"]) == (big_model.LAYERS, 0)
    assert report["check"]["passed"]
    verify(output)
    assert output.stat().st_size < 100_000
    tensors = [v.const_value for v in ir.load(output).graph.initializers.values() if v.const_value is not None]
    outside = {t.name for t in tensors if isinstance(t, ir.ExternalTensor)}
    assert outside == {t.name for t in tensors if t.nbytes >= SMALL_BYTES}
    assert len(outside) == 1 + 6 * big_model.LAYERS
