# SPDX-License-Identifier: Apache-2.0
"""What the tests of the CPU's kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.cpu.cpu_library import KERNELS, CpuLibrary


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, native_build: Path) -> tuple[CpuLibrary, str]:
    """The library, and each of its instruction sets that this processor runs."""
    library = CpuLibrary(native_build / "lib" / "libcpu_door.so")
    if reason := library.why_not(request.param):
        pytest.skip(reason)
    return library, request.param
