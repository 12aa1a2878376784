# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says, and its figures show what it claims."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import engine_stand_in
import pytest

SCRIPT = Path(__file__).parent / "long_context.py"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("long_context")
    command = [sys.executable, str(SCRIPT), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return out, done


@pytest.mark.xdist_group("long_context")
def test_memory_grows_with_the_square_of_the_length_unfused_and_with_the_length_fused(
    sample: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = sample
    for name in ("causal fp32", "causal softcap fp16"):
        (row,) = (line for line in done.stdout.splitlines() if name in line)
        sizes = [float(number.replace(",", "")) for number in re.findall(r"[\d,]+\.\d", row)]
        unfused, fused = sizes[0::2], sizes[1::2]
        assert unfused[2] > 10 * unfused[1] > 100 * unfused[0] / 1.5
        assert fused[2] <= 4.1 * fused[1]
        assert fused[2] < unfused[2] / 50
    assert done.stderr.count("unfused_chain") == 6
    assert done.stderr.count(": plugin") == 6
    told = re.search(r"peak memory of a run ([\d,]+) -> ([\d,]+) MiB", done.stdout)
    assert told is not None
    before, after = (int(number.replace(",", "")) for number in told.groups())
    assert after < before / 4


ENGINES = ("causal_fp32.flash", "causal_softcap_fp16.flash")


@pytest.mark.xdist_group("long_context")
def test_each_layer_becomes_one_engine_for_all_lengths(
    sample: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, done = sample
    for name in ENGINES:
        sidecar = json.loads((out / f"{name}.engine.json").read_text())
        assert [found["by"] for found in sidecar["attention"]] == ["plugin"]
        assert [sidecar["profile"]["x"][kind][1] for kind in ("min", "opt", "max")] == [1024, 4096, 16384]
        ran, left = f"{name}.engine, S = 16,384: by the TensorRT plugin", f"{name}.engine is not run here: "
        assert (ran in done.stdout) is not (left in done.stdout)


@pytest.mark.gpu
@pytest.mark.xdist_group("long_context")
def test_on_a_gpu_the_engines_compute_what_the_cpu_does(
    sample: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    for name in ENGINES:
        assert sample[1].stdout.count(f"{name}.engine, S = ") == 3


@pytest.mark.xdist_group("long_context")
def test_an_engine_that_computes_something_else_ends_the_sample(
    sample: tuple[Path, subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The GPU's step with a stand-in for the engine, at lengths that a CPU makes short work of."""
    module = engine_stand_in.as_module(SCRIPT)
    for name in ENGINES:
        fused, engine = sample[0] / f"{name}.onnx", sample[0] / f"{name}.engine"
        engine_stand_in.put_in(monkeypatch, {engine.name: fused})
        monkeypatch.setattr(module, "build", lambda *_: None)  # the engine that is there
        module.on_gpu(fused, engine, (7, 64, 131))
        assert capsys.readouterr().out.count(engine_stand_in.SAYS) == 3
        monkeypatch.setattr(engine_stand_in.EngineStandIn, "spoils", 0.5)
        with pytest.raises(SystemExit, match="disagree at S = 7"):
            module.on_gpu(fused, engine, (7, 64, 131))
        assert engine_stand_in.EngineStandIn.open == 0
