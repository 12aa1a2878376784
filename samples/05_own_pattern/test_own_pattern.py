# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says, and a pattern that reads wrongly is caught before a file is written."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import engine_stand_in
import onnx_ir as ir
import pytest

from flash_export import pipeline
from flash_export.canonical import Attention
from flash_export.errors import NumbersDiffer
from flash_export.options import Options
from flash_export.patterns import PATTERNS
from flash_export.region import Region

HERE = Path(__file__).parent


def test_the_operator_is_fused_and_proven_once_its_pattern_is_known(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "own_pattern.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "fused without the pattern: 0, with it: 1, and proven" in done.stdout
    assert "model.flash.engine: attention by plugin" in done.stdout
    sidecar = json.loads((tmp_path / "model.flash.engine.json").read_text())
    assert [layer["operator"] for layer in sidecar["plugin_layers"]] == ["FlashAttention"]
    assert ("as acme::TemperedAttention itself" in done.stdout) is not ("The engine is not run here" in done.stdout)


@pytest.mark.gpu
def test_on_a_gpu_the_engine_computes_what_the_operators_own_function_does(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "own_pattern.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "the TensorRT plugin, in the engine: as acme::TemperedAttention itself" in done.stdout, done.stderr


def test_the_engine_is_compared_with_the_operators_own_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU's step with a stand-in for the engine: the model itself, right and spoiled."""
    monkeypatch.syspath_prepend(str(HERE))
    module = engine_stand_in.as_module(HERE / "own_pattern.py")
    model = module.write_model(tmp_path / "model.onnx")
    engine_stand_in.put_in(monkeypatch, {"m.engine": model})
    (tmp_path / "m.engine").write_bytes(b"ftrt")
    module.run_engine(model, tmp_path / "m.engine")
    assert f"{engine_stand_in.SAYS}: as acme::TemperedAttention itself" in capsys.readouterr().out
    monkeypatch.setattr(engine_stand_in.EngineStandIn, "spoils", 0.5)
    with pytest.raises(SystemExit, match="disagree"):
        module.run_engine(model, tmp_path / "m.engine")
    assert engine_stand_in.EngineStandIn.open == 0


def test_a_pattern_that_forgets_the_temperature_is_caught_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    import own_pattern
    import tempered_attention

    def forgetful(anchor: ir.Node, region: Region) -> Attention:
        right = tempered_attention.read(anchor, region)
        return dataclasses.replace(right, scale=right.scale * own_pattern.TEMPERATURE)

    monkeypatch.setitem(PATTERNS, (tempered_attention.DOMAIN, tempered_attention.NAME), forgetful)
    output = tmp_path / "model.flash.onnx"
    with pytest.raises(NumbersDiffer) as caught:
        pipeline.run(Options(source=own_pattern.write_model(tmp_path / "model.onnx"), output=output, quiet=True))
    assert "attention" in caught.value.where
    assert caught.value.do.endswith(f"and correct the reader in {forgetful.__module__}")
    assert not output.exists()
