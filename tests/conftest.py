# SPDX-License-Identifier: Apache-2.0
"""What every test can use: the repository's root and the native build tree."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


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
