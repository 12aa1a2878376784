# SPDX-License-Identifier: Apache-2.0
"""The model that docs/kv_cache.md writes: it decodes in ONNX Runtime as attention over all keys does, and builds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from contract.reference import attention

from flash_export import command
from flash_export.errors import EXIT_OK
from flash_trt.cli import app
from flash_trt.output import sidecar_path

CAPACITY = 24


@pytest.fixture(scope="module")
def step(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``step.onnx``, made by the page's own lines."""
    (block,) = re.findall(r"```python\n(.*?)```", (repo_root / "docs" / "kv_cache.md").read_text(), flags=re.S)
    folder = tmp_path_factory.mktemp("cache_page")
    subprocess.run([sys.executable, "-c", block], cwd=folder, check=True, timeout=120)
    return folder / "step.onnx"


def test_steps_of_several_lengths_attend_to_all_that_came_before(step: Path) -> None:
    onnx.checker.check_model(step, full_check=True, check_custom_domain=True)
    session = onnxruntime.InferenceSession(step, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    kept = {name: np.zeros((2, 2, CAPACITY, 16), np.float32) for name in ("key_cache", "value_cache")}
    lengths, keys, values = np.zeros(2, np.int32), [], []
    for new in (5, 1, 1, 7, 1):
        query = random.standard_normal((2, 4, new, 16)).astype(np.float32)
        key, value = (random.standard_normal((2, 2, new, 16)).astype(np.float32) for _ in range(2))
        keys.append(key)
        values.append(value)
        feeds = {"query": query, "key": key, "value": value, "kv_lengths": lengths, **kept}
        feeds |= {"bias": np.zeros((1, 1, 1, 1), np.float32), "sinks": np.full(1, -np.inf, np.float32)}
        output, _, lengths, *caches = session.run(None, feeds)
        kept = dict(zip(kept, caches, strict=True))
        seen = np.concatenate(keys, 2), np.concatenate(values, 2)
        expected, _ = attention(query, *seen, scale=0.25, causal=1, diagonal=1)
        np.testing.assert_allclose(output, expected, atol=2e-6)
        assert lengths.tolist() == [seen[0].shape[2]] * 2


def test_flash_trt_builds_it_with_the_plugin(step: Path) -> None:
    shapes = ("query:1x4x1x16,2x4x1x16,4x4x8x16", "key_cache:1x2x64x16,2x2x64x16,4x2x64x16")
    flags = [word for shape in shapes for word in ("--shape", shape)]
    engine = step.with_suffix(".engine")
    build = ["build", str(step), "-o", str(engine), "--backend", "tensorrt-rtx", "--target", "sm80", *flags]
    assert command.run(app, build) == EXIT_OK
    sidecar = json.loads(sidecar_path(engine).read_text())
    assert sidecar["plugin_layers"] == [{"name": "attention", "operator": "FlashAttentionCache"}]
    assert sidecar["plan_proof"] == "fields"
