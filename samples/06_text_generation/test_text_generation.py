# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engine_stand_in
import numpy as np
import pytest
from transformers import LlamaForCausalLM

import flash_trt

SCRIPT = Path(__file__).parent / "text_generation.py"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("text_generation")
    command = [sys.executable, str(SCRIPT), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr, "a library's progress bar among the steps"
    return out, done.stdout


@pytest.mark.xdist_group("text_generation")
def test_the_fused_model_chooses_the_64_tokens_that_pytorch_chooses(sample: tuple[Path, str]) -> None:
    out, said = sample
    assert "our CPU operator in ONNX Runtime: 64 tokens, each as PyTorch chose it" in said
    report = json.loads((out / "report.json").read_text())
    assert report["fused"] == 2
    _require_engine(json.loads((out / "model.engine.json").read_text()))
    assert {(site["q_heads"], site["kv_heads"], site["causal"]) for site in report["sites"]} == {(4, 2, "bottom_right")}
    last = said.splitlines()[-1]
    assert last.startswith("the TensorRT plugin, in the engine: 64 tokens") is not (
        last.startswith("The engine is not run here: ")
    )


@pytest.mark.gpu
@pytest.mark.xdist_group("text_generation")
def test_on_a_gpu_the_engine_chooses_the_same_64_tokens(sample: tuple[Path, str]) -> None:
    assert "the TensorRT plugin, in the engine: 64 tokens, each as PyTorch chose it" in sample[1]


@pytest.mark.xdist_group("text_generation")
def test_an_engine_that_chooses_other_tokens_ends_the_sample(
    sample: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU's step with a stand-in for the engine."""
    module, engine = engine_stand_in.as_module(SCRIPT), sample[0] / "model.engine"
    engine_stand_in.put_in(monkeypatch, {engine.name: sample[0] / "model.onnx"})
    model = LlamaForCausalLM.from_pretrained(sample[0] / "llama").eval()
    prompt = np.frombuffer(module.PROMPT.encode(), np.uint8).astype(np.int64)[None]
    theirs = module.generate_with_torch(model, prompt)
    assert flash_trt.why_not_here(engine) == ""
    module.with_engine(engine, model.config, prompt, theirs)
    assert f"{engine_stand_in.SAYS}: 64 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="part at step 63"):
        module.with_engine(engine, model.config, prompt, [*theirs[:-1], theirs[-1] + 1])
    assert engine_stand_in.EngineStandIn.open == 0


def _require_engine(sidecar: dict) -> None:
    assert [layer["operator"] for layer in sidecar["plugin_layers"]] == ["FlashAttentionEx"] * 2
    assert sidecar["plan_proof"] == "fields"
    masks = [profile["attention_mask"] for profile in sidecar["profiles"]]  # past + seq, of prompts and of tokens
    lengths = [[mask[kind][1] for kind in ("min", "opt", "max")] for mask in masks]
    assert lengths == [[1, 11, 64], [2, 65, 193]]
