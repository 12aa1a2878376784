# SPDX-License-Identifier: Apache-2.0
"""One build of the library runs the contract in the oldest ONNX Runtime that it serves, a later and the newest one.

Each has a folder of its own under build/, filled from the package index once and kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contract import tensors
from contract.cases import CASES
from contract.node_model import feeds, model_of_case, results

from flash_trt import cpu_operator_path
from plugin.cpu import run_models
from plugin.cpu.cpu_library import why_wrong

# What their code imports of other packages is NumPy alone; 1.17 was built for NumPy 1.
VERSIONS = {
    "1.17.3": ["onnxruntime==1.17.3", "numpy<2"],
    "1.23.2": ["onnxruntime==1.23.2", "numpy"],
    "newest": ["onnxruntime", "numpy"],
}


def environment(root: Path, version: str) -> Path:
    """A folder with this version and what it needs; skips the test where it cannot be filled."""
    folder = root / "build" / "onnxruntime" / f"{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    if folder.is_dir():
        return folder
    filling = folder.with_suffix(f".{os.getpid()}")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(filling),
        *VERSIONS[version],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    if done.returncode:
        shutil.rmtree(filling, ignore_errors=True)
        pytest.skip(f"onnxruntime {version} cannot be installed here: {done.stderr.strip()[-300:]}")
    filling.rename(folder)
    return folder


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
    return folder


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.xdist_group("onnxruntime_versions")
def test_the_library_runs_the_contract_in(version: str, models: Path, repo_root: Path) -> None:
    packages = environment(repo_root, version)
    command = [sys.executable, "-S", run_models.__file__, str(models), cpu_operator_path()]
    alone = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=alone)
    assert done.returncode == 0, done.stderr[-2000:]
    assert version in (done.stdout.strip(), "newest")
    wrong = {}
    for case in CASES:
        with np.load(models / f"{case.name}.out.npz") as outputs:
            if reasons := why_wrong(case, *results(case, list(outputs.values()))):
                wrong[case.name] = reasons
    assert wrong == {}
