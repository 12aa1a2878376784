# SPDX-License-Identifier: Apache-2.0
"""A decoder of ONNX Runtime GenAI's kind is fused, proven, generates the same, and builds with the plugin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from end_to_end.genai_models import DEPTH, KV_HEADS, LAYERS, WORDS, write

from flash_export import pipeline
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.talk import Talk
from flash_trt.build import BuildOptions, build

SUM = "past_sequence_length + sequence_length"


def exported(folder: Path, total: str) -> tuple[Path, Path]:
    source, fused = folder / "model.onnx", folder / "model.flash.onnx"
    write(source, total)
    result = pipeline.run(Options(source=source, output=fused), Talk(quiet=True))
    assert [s.status for s in result.sites] == ["fused"] * LAYERS, [s.reason for s in result.sites]
    nodes = onnx.load(fused).graph.node
    assert sum(n.domain == DOMAIN for n in nodes) == LAYERS
    assert not [n for n in nodes if n.op_type == "GroupQueryAttention"]
    return source, fused


def generated(path: Path, prompts: list[list[int]], steps: int, buffer: int) -> list[list[int]]:
    """Greedy tokens of prompts padded on the right; the cache is a buffer of that length, or grows where it is 0."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_outputs()]
    lengths = np.array([len(p) for p in prompts])
    cache = [np.zeros((len(prompts), KV_HEADS, buffer, DEPTH), np.float32)] * (2 * LAYERS)
    tokens = np.zeros((len(prompts), lengths.max()), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    chosen: list[list[int]] = [[] for _ in prompts]
    for step in range(steps):
        mask = (np.arange(lengths.max())[None] < lengths[:, None]).astype(np.int64)
        feeds = {"input_ids": tokens, "attention_mask": mask}
        feeds |= {n.replace("present", "past_key_values"): c for n, c in zip(names[1:], cache, strict=True)}
        logits, *cache = session.run(names, feeds)
        at = lengths - 1 if step == 0 else np.zeros(len(prompts), int)
        tokens = logits[np.arange(len(prompts)), at].argmax(-1)[:, None]
        for row, token in zip(chosen, tokens[:, 0], strict=True):
            row.append(int(token))
        lengths = lengths + 1
    return chosen


@pytest.mark.parametrize("buffer", [0, 40])
@pytest.mark.parametrize("total", ["total_sequence_length", SUM])
def test_prompts_of_unequal_lengths_go_on_as_before(total: str, buffer: int, tmp_path: Path) -> None:
    source, fused = exported(tmp_path, total)
    random = np.random.default_rng(0)
    prompts = [list(random.integers(0, WORDS, n)) for n in (7, 4, 1)]
    right, got = (generated(path, prompts, 12, buffer) for path in (source, fused))
    assert got == right
    assert len({tuple(row) for row in got}) == len(prompts)


def test_an_engine_is_built_with_the_plugin_in_it(tmp_path: Path) -> None:
    _, fused = exported(tmp_path, SUM)
    shapes = ["input_ids:1x1,1x1,1x8", "attention_mask:1x2,1x8,1x64"]
    for i in range(LAYERS):
        cache = [f"1x{KV_HEADS}x{n}x{DEPTH}" for n in (1, 7, 56)]
        shapes += [f"past_key_values.{i}.{which}:{','.join(cache)}" for which in ("key", "value")]
    engine = tmp_path / "model.engine"
    built = build(BuildOptions(fused, engine, "tensorrt-rtx", tuple(shapes), ("sm89",)), Talk(quiet=True))
    assert engine.exists()
    assert built is not None
