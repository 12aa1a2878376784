# SPDX-License-Identifier: Apache-2.0
"""The program compiles against TensorRT's headers, links with a real TensorRT, and says what is missing here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plugin.autoload import lean_runtime

from flash_trt import gpu, plugin_library

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NATIVE = ROOT / "build" / "native"

# One worker fetches the lean runtime; tests/plugin/autoload needs the same.
pytestmark = pytest.mark.xdist_group("autoload")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, built as its README says, with the lean TensorRT in TensorRT's place."""
    build = tmp_path_factory.mktemp("cpp_engine")
    cudart = re.search(r"^CUDA_cudart_static_LIBRARY:\w+=(.+)$", (NATIVE / "CMakeCache.txt").read_text(), re.M)
    assert cudart is not None
    settings = {
        "CUDAToolkit_ROOT": Path(cudart[1]).parents[1],
        "TENSORRT_INCLUDE_DIR": NATIVE / "tensorrt_headers",
        "TENSORRT_LIBRARY": lean_runtime.library(ROOT, "10"),
    }
    flags = [f"-D{name}={value}" for name, value in settings.items()]
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None, "cmake is missing: pip install cmake"
    for command in ([cmake, "-S", str(HERE), "-B", str(build), *flags], [cmake, "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "run_engine"


def _run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


def test_wrong_arguments_end_with_2_and_the_usage(program: Path) -> None:
    done = _run(program, "only one")
    assert done.returncode == 2
    assert "ENGINE libflash_attention_plugin.so" in done.stderr


@pytest.mark.skipif(bool(gpu.devices()), reason="a GPU is here; without one the program must say so")
def test_without_a_gpu_it_ends_with_5_and_says_so(program: Path) -> None:
    done = _run(program, "model.engine", plugin_library.find())
    assert done.returncode == 5
    assert "this machine's GPU" in done.stderr


@pytest.mark.skipif(not gpu.devices(), reason="no GPU here, so the engine is not reached")
def test_on_a_gpu_what_is_no_engine_ends_with_5(program: Path, tmp_path: Path) -> None:
    (tmp_path / "no.engine").write_bytes(b"no engine")
    done = _run(program, tmp_path / "no.engine", plugin_library.find())
    assert done.returncode == 5
    assert "the engine does not load" in done.stderr
