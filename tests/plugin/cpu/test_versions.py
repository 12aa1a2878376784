# SPDX-License-Identifier: Apache-2.0
"""One build of the library runs the contract in the oldest ONNX Runtime that it serves, a later and the newest one, and
an older one says which version it is and which is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from contract import cache_cases, cache_model, tensors
from contract.cache_cases import CACHE_CASES
from contract.cases import CASES
from contract.node_model import feeds, model_of, model_of_case, results

from flash_trt import cpu_operator_path
from plugin.cpu import onnxruntimes, run_models
from plugin.cpu.cpu_library import why_wrong

VERSIONS = {"1.17.3": onnxruntimes.NUMPY_1, "1.23.2": "numpy", "newest": "numpy"}
pytestmark = pytest.mark.xdist_group("onnxruntime_versions")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every row's model without its body, and its inputs."""
    folder = tmp_path_factory.mktemp("models")
    for case in CASES:
        arrays = tensors.node_inputs(case, tensors.make(case))
        proto = model_of_case(case, arrays, 18)
        del proto.functions[:]
        (folder / f"{case.name}.onnx").write_bytes(proto.SerializeToString())
        np.savez(folder / f"{case.name}.npz", **feeds(case, arrays))
    for cache_case in CACHE_CASES:
        given = cache_cases.make(cache_case)
        proto = model_of([cache_model.node_of(given)], 18)
        del proto.functions[:]
        (folder / f"cache_{cache_case.name}.onnx").write_bytes(proto.SerializeToString())
        np.savez(folder / f"cache_{cache_case.name}.npz", **cache_model.feeds(given))
    return folder


@pytest.mark.parametrize("wanted", VERSIONS)
def test_the_library_runs_the_contract_in(wanted: str, models: Path, repo_root: Path) -> None:
    version = onnxruntimes.newest() if wanted == "newest" else wanted
    packages = onnxruntimes.environment(repo_root, version, VERSIONS[wanted])
    done = onnxruntimes.run(packages, run_models.__file__, str(models), cpu_operator_path())
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == version
    wrong = {}
    for case in CASES:
        with np.load(models / f"{case.name}.out.npz") as outputs:
            if reasons := why_wrong(case, *results(case, list(outputs.values()))):
                wrong[case.name] = reasons
    for cache_case in CACHE_CASES:
        with np.load(models / f"cache_{cache_case.name}.out.npz") as outputs:
            if reasons := cache_model.why_wrong(cache_cases.make(cache_case), list(outputs.values())):
                wrong[cache_case.name] = reasons
    assert wrong == {}


def test_a_runtime_that_is_too_old_is_refused_with_both_versions(models: Path, repo_root: Path) -> None:
    packages = onnxruntimes.environment(repo_root, "1.16.3", onnxruntimes.NUMPY_1)
    done = onnxruntimes.run(packages, run_models.__file__, str(models), cpu_operator_path())
    assert done.returncode == 1
    for part in ("got   version 1.16.3", "need  version 1.17 or newer", "do    install a newer onnxruntime"):
        assert part in done.stderr


def test_a_version_that_cannot_be_installed_is_a_failure_with_words_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "ERROR: no matching distribution"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(onnxruntimes.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.delenv(onnxruntimes.OFFLINE, raising=False)
    with pytest.raises(pytest.fail.Exception, match=said):
        onnxruntimes.environment(tmp_path, "1.17.3")
    assert list(tmp_path.rglob("*")) == []


def test_a_machine_that_says_that_it_is_offline_skips_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(onnxruntimes.OFFLINE, "1")
    with pytest.raises(pytest.skip.Exception, match=onnxruntimes.OFFLINE):
        onnxruntimes.environment(tmp_path, "1.17.3")
