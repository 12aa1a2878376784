# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engine_stand_in
import onnx
import pytest

import flash_trt

SCRIPT = Path(__file__).parent / "sentence_encoder.py"

# What a user without any of our packages runs: only onnxruntime and numpy are imported.
PLAIN_ONNX_RUNTIME = """
import sys, numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
feeds = {i.name: np.ones((2, 5), np.int64) for i in session.get_inputs()}
hidden = session.run(None, feeds)[0]
assert hidden.shape == (2, 5, 384) and np.isfinite(hidden).all()
assert not any(name.startswith("flash_") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out)], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr, "a library's progress bar among the steps"
    return out, done.stdout


@pytest.mark.xdist_group("sentence_encoder")
def test_every_attention_of_the_encoder_is_one_node(sample: tuple[Path, str]) -> None:
    graph = onnx.load(sample[0] / "model.onnx").graph
    kinds = [node.op_type for node in graph.node]
    assert sum(kind.startswith("FlashAttention") for kind in kinds) == 6
    assert "Softmax" not in kinds


@pytest.mark.xdist_group("sentence_encoder")
def test_the_search_finds_the_sentence_that_answers_the_question(sample: tuple[Path, str]) -> None:
    assert "forgot password" in " ".join(sample[1].split())


@pytest.mark.xdist_group("sentence_encoder")
def test_the_operator_for_the_cpu_gives_the_same_answer(sample: tuple[Path, str]) -> None:
    said = " ".join(sample[1].replace("│", " ").split())
    assert said.count("forgot password") == 2
    assert "libflash_attention_cpu.so in ONNX Runtime" in said


@pytest.mark.xdist_group("sentence_encoder")
def test_plain_onnxruntime_runs_the_fused_file(sample: tuple[Path, str]) -> None:
    fused = sample[0] / "model.onnx"
    subprocess.run([sys.executable, "-c", PLAIN_ONNX_RUNTIME, str(fused)], check=True, timeout=120)


@pytest.mark.xdist_group("sentence_encoder")
def test_the_sample_searches_with_its_engine_or_says_why_not(sample: tuple[Path, str]) -> None:
    said = " ".join(sample[1].replace("│", " ").split())
    assert ("the TensorRT plugin, in the engine" in said) is not ("The engine is not run here: " in said)
    assert said.count("answers") == (3 if "in the engine: " in said else 2)


@pytest.mark.gpu
@pytest.mark.xdist_group("sentence_encoder")
def test_on_a_gpu_the_engine_gives_the_same_answer(sample: tuple[Path, str]) -> None:
    said = " ".join(sample[1].replace("│", " ").split())
    assert "the TensorRT plugin, in the engine" in said
    assert said.count("forgot password") == 3


@pytest.mark.xdist_group("sentence_encoder")
def test_the_search_with_an_engine_agrees_or_ends_the_sample(
    sample: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's step with a stand-in for the engine."""
    module, engine = engine_stand_in.as_module(SCRIPT), sample[0] / "model.engine"
    engine_stand_in.put_in(monkeypatch, {engine.name: sample[0] / "model.onnx"})
    assert flash_trt.why_not_here(engine) == ""
    told = module.search_with_engine(module.minilm_folder(), engine)
    assert told.startswith(engine_stand_in.SAYS)
    assert "forgot password" in told
    monkeypatch.setattr(engine_stand_in.EngineStandIn, "spoils", 0.5)
    with pytest.raises(SystemExit, match="disagree"):
        module.search_with_engine(module.minilm_folder(), engine)
    assert engine_stand_in.EngineStandIn.open == 0


@pytest.mark.xdist_group("sentence_encoder")
def test_the_engine_holds_our_plugin_six_times(sample: tuple[Path, str]) -> None:
    sidecar = json.loads((sample[0] / "model.engine.json").read_text())
    assert len(sidecar["plugin_layers"]) == 6
    assert (sample[0] / "model.engine").stat().st_size > 0
