# SPDX-License-Identifier: Apache-2.0
"""Where the build takes TensorRT's headers and nvcc from, and what it says when there are none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PARTS = ("got   ", "need  ", "do    ")


def configure(repo_root: Path, folder: Path, module: str, *options: str) -> tuple[int, str]:
    """Configures a project that includes ``cmake/<module>.cmake`` alone, without a package index."""
    source = folder / "source"
    source.mkdir()
    source.joinpath("CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(part LANGUAGES NONE)\n"
        f'set(PROJECT_SOURCE_DIR "{repo_root}")\nlist(APPEND CMAKE_MODULE_PATH "{repo_root}/cmake")\n'
        f"include({module})\n"
    )
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None, "cmake is not installed"
    done = subprocess.run(
        [cmake, "-S", source, "-B", folder / "build", f"-DPython3_EXECUTABLE={sys.executable}", *options],
        env={"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, re.sub(r"[ \n]+", " ", done.stdout + done.stderr)


def has_parts(text: str) -> bool:
    return all(part.strip() in text for part in PARTS)


def test_headers_named_by_the_user_are_taken(repo_root: Path, native_build: Path, tmp_path: Path) -> None:
    headers = tmp_path / "TensorRT" / "include"
    headers.mkdir(parents=True)
    headers.joinpath("NvInferRuntime.h").write_text("class IPluginCreatorV3One : public IPluginCreatorInterface\n")
    status, said = configure(repo_root, tmp_path, "tensorrt_headers", f"-DTENSORRT_ROOT={headers.parent}")
    assert status == 0, said
    assert f"TensorRT headers: {headers}" in said


def test_headers_without_the_v3_interface_are_refused(repo_root: Path, tmp_path: Path) -> None:
    headers = tmp_path / "TensorRT-8"
    headers.mkdir()
    headers.joinpath("NvInferRuntime.h").write_text("class IPluginCreator\n")
    status, said = configure(repo_root, tmp_path, "tensorrt_headers", f"-DTENSORRT_ROOT={headers}")
    assert status != 0
    assert "no NvInferRuntime.h with IPluginCreatorV3One" in said
    assert has_parts(said)


def test_no_headers_and_no_index_say_what_to_do(repo_root: Path, tmp_path: Path) -> None:
    without = ["-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", "-DCMAKE_MAKE_PROGRAM=/usr/bin/make"]
    status, said = configure(repo_root, tmp_path, "tensorrt_headers", *without)
    assert status != 0
    assert "name its folder in TENSORRT_ROOT" in said
    assert has_parts(said)


def test_no_nvcc_and_no_index_say_what_to_do(repo_root: Path, tmp_path: Path) -> None:
    status, said = configure(repo_root, tmp_path, "cuda_compiler", "-DFLASH_EXPORT_NVCC_FROM_PYPI=ON")
    assert status != 0
    assert "name nvcc in the environment variable CUDACXX" in said
    assert has_parts(said)
