# SPDX-License-Identifier: Apache-2.0
"""The kernels on aarch64: compiled by a cross compiler into NEON code, and right under qemu-user."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER, DISASSEMBLER, EMULATOR = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump", "qemu-aarch64"


@pytest.fixture(scope="module")
def program(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cpu_kernel_tests for aarch64, linked statically."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} here (Debian: g++-aarch64-linux-gnu)")
    cpu, tests = repo_root / "plugin" / "cpu", repo_root / "tests" / "plugin"
    sources = [cpu / name for name in ("attention.cpp", "instruction_sets.cpp", "kernels_plain.cpp")]
    sources += [tests / "cpu" / "test_kernels.cpp", tests / "reference.cpp"]
    flags = ["-std=c++20", "-O2", "-static", "-pthread", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror"]
    folders = [f"-I{folder}" for folder in (cpu, repo_root / "plugin", tests)]
    built = tmp_path_factory.mktemp("aarch64") / "cpu_kernel_tests"
    subprocess.run([COMPILER, *flags, *folders, *map(str, sources), "-o", str(built)], check=True, timeout=300)
    return built


@pytest.mark.xdist_group("neon")
def test_the_products_are_fused_products_of_four_lanes(program: Path) -> None:
    code = subprocess.run([DISASSEMBLER, "-d", str(program)], capture_output=True, text=True, check=True).stdout
    assert sum("fmla" in line and ".4s" in line for line in code.splitlines()) > 500


@pytest.mark.xdist_group("neon")
def test_the_kernels_are_right_on_neon(program: Path) -> None:
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"no {EMULATOR} here (Debian: qemu-user)")
    done = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "plain: 0 failed" in done.stdout
