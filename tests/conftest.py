# SPDX-License-Identifier: Apache-2.0
"""What every test can use: marks, the repository's root and the native build tree."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; its twin on the CPU runs everywhere")
    config.addinivalue_line("markers", "corpus: the whole corpus of architectures; `make corpus` runs it")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (reason := _why_no_gpu()) is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    """Why tests marked gpu cannot run here; asked of the driver, since torch may be a CPU build."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver here (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    return None


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def native_build() -> Path:
    """The native build tree; a test that needs it fails, with what to do, when it is not there."""
    build = ROOT / "build" / "native"
    if not (build / "CMakeCache.txt").is_file():
        pytest.fail(
            "the native build tree is missing; build it with: "
            "cmake -S . -B build/native -G Ninja -DFLASH_EXPORT_TESTS=ON && cmake --build build/native",
            pytrace=False,
        )
    return build
