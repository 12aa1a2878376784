# SPDX-License-Identifier: Apache-2.0
"""``flash-trt inspect`` asks TensorRT's engine inspector where an engine loads, and says why where it does not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from python.attention_models import HEAD_DIM, HEADS, fused

from flash_export.errors import EXIT_OK
from flash_trt import engine_inspector, engine_load, gpu
from flash_trt.output import sidecar_path

Command = Callable[..., int]
LAYERS = [
    {"Name": "attention", "LayerType": "PluginV3"},
    {"Name": "linear", "LayerType": "gemm"},
    {"Name": "linear 2", "LayerType": "gemm"},
]


@pytest.fixture
def engine(rtx: object, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "m.engine"
    shape = f"query:2x{HEADS}x131x{HEAD_DIM}"
    build = ("build", fused(tmp_path / "m.onnx"), "-o", path, "--target", "sm80", "--shape", shape)
    assert flash_trt(*build) == EXIT_OK
    capsys.readouterr()
    return path


def answers(monkeypatch: pytest.MonkeyPatch, text: str, **engine: Any) -> list[bool]:
    """Lets every engine load and its inspector answer ``text``; the list gets the trust of each load."""
    trusts: list[bool] = []
    forms = SimpleNamespace(LayerInformationFormat=SimpleNamespace(JSON="json", ONELINE="oneline"))

    def tell(form: str) -> str:
        assert form == "json"
        return text

    inspector = SimpleNamespace(get_engine_information=tell)

    def load(path: Path, *, trusted: bool) -> SimpleNamespace:
        trusts.append(trusted)
        made = SimpleNamespace(create_engine_inspector=lambda: inspector, **engine)
        return SimpleNamespace(backend=SimpleNamespace(trt=forms), engine=made)

    monkeypatch.setattr(engine_load, "load", load)
    return trusts


def told(flash_trt: Command, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert flash_trt("inspect", *arguments, "--json") == EXIT_OK
    return json.loads(capsys.readouterr().out)["inspector"]


def test_the_inspectors_layers_are_told_and_counted_by_type(
    engine: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, json.dumps({"Layers": LAYERS, "Bindings": []}), device_memory_size_v2=3 * 2**20)
    assert told(flash_trt, capsys, engine) == {"layers": LAYERS, "device_memory_bytes": 3 * 2**20, "why": None}
    assert flash_trt("inspect", engine) == EXIT_OK
    said = capsys.readouterr().out
    assert "3 layers: 2 gemm, 1 PluginV3" in said
    assert "3.00 MiB" in said


def test_layers_of_an_engine_built_elsewhere_may_be_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, json.dumps({"Layers": ["a", "b"]}))
    found = engine_inspector.ask(Path("m.engine"))
    assert found["device_memory_bytes"] is None
    assert engine_inspector.as_rows(found) == [("engine inspector", "2 layers: 2 named only")]


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}"])
def test_an_answer_that_cannot_be_read_is_told_and_no_failure(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    answers(monkeypatch, text)
    found = engine_inspector.ask(Path("m.engine"))
    assert found["layers"] is None
    assert "cannot be read" in found["why"]


def test_without_a_gpu_it_says_so(
    engine: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "devices", list)
    found = told(flash_trt, capsys, engine)
    assert found["layers"] is None
    assert "no NVIDIA GPU" in found["why"]
    assert flash_trt("inspect", engine) == EXIT_OK
    assert "no NVIDIA GPU" in capsys.readouterr().out


def test_an_engine_that_its_sidecar_does_not_vouch_for_is_not_loaded(
    engine: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar_path(engine).unlink()
    assert "loading an engine runs code" in told(flash_trt, capsys, engine)["why"]


def test_trust_is_the_users_to_give(
    engine: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trusts = answers(monkeypatch, json.dumps({"Layers": LAYERS}))
    told(flash_trt, capsys, engine)
    told(flash_trt, capsys, engine, "--trust-engine")
    assert trusts == [False, True]


# --- who computes the attentions of which a plan tells nothing --------------------------------------------------------


def _entry(name: str, by: str) -> dict[str, Any]:
    return {"name": name, "by": by, "scratch_bytes": None}


ASKED = [_entry(name, "not_told") for name in ("fused", "chain", "unknown")] + [_entry("ours", "plugin")]
TOLD_LAYERS = [
    {"Name": "_gemm_mha_v2_myl0_3", "LayerType": "gemm", "Metadata": "[ONNX Layer: mm]\x1e[ONNX Layer: fused]"},
    {"Name": "__myl_Exp_myl0_4", "LayerType": "kgen", "TacticName": "", "Metadata": "[ONNX Layer: node_of_chain]"},
    {"Name": "_gemm_mha_v2_myl0_9", "LayerType": "gemm", "Metadata": "[ONNX Layer: ours]"},
    "named only",
]  # fmt: skip


@pytest.mark.parametrize("replaced", [False, True], ids=["ours", "another build's by now"])
def test_what_a_plan_does_not_tell_its_inspector_is_asked_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replaced: bool
) -> None:
    path = tmp_path / "m.engine"
    path.write_bytes(b"another" if replaced else b"ours")
    monkeypatch.setattr(gpu, "devices", lambda: ["a GPU"])
    answers(monkeypatch, json.dumps({"Layers": TOLD_LAYERS}))
    sidecar = {
        "attention": [dict(entry) for entry in ASKED],
        "engine": {"sha256": hashlib.sha256(b"ours").hexdigest()},
    }
    engine_inspector.complete(path, sidecar)
    told_by = {entry["name"]: entry["by"] for entry in sidecar["attention"]}
    assert told_by == {"fused": "tensorrt_fused", "chain": "unfused_chain", "unknown": "not_told", "ours": "plugin"}
    assert sidecar_path(path).exists() is not replaced
    assert replaced or json.loads(sidecar_path(path).read_text()) == sidecar


@pytest.mark.parametrize("devices", [[], ["a GPU"]], ids=["no GPU", "all told"])
def test_nobody_is_asked_without_need_or_a_gpu(
    devices: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "devices", lambda: devices)
    trusts = answers(monkeypatch, json.dumps({"Layers": TOLD_LAYERS}))
    sidecar = {"attention": ASKED if not devices else ASKED[3:]}
    engine_inspector.complete(tmp_path / "m.engine", sidecar)
    assert trusts == []
    assert list(tmp_path.iterdir()) == []
