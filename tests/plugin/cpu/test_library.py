# SPDX-License-Identifier: Apache-2.0
"""The built files: what the library exports and needs, and that no code of one instruction set reaches another's."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from plugin.test_library import C_LIBRARY, dynamic_entries, tool

LIBRARY = "libflash_attention_cpu.so"
OBJECTS = "plugin/cpu/CMakeFiles/flash_attention_cpu_kernels.dir"


def symbols(file: Path, *flags: str) -> list[list[str]]:
    return [line.split() for line in tool("nm", *flags, str(file)).splitlines() if line and not line.endswith(":")]


def test_the_library_exports_its_entry_point_alone(native_build: Path) -> None:
    assert [s[-1] for s in symbols(native_build / "lib" / LIBRARY, "-D", "--defined-only")] == ["RegisterCustomOps"]


def test_the_library_needs_the_c_library_alone(native_build: Path) -> None:
    needed = dynamic_entries(native_build / "lib" / LIBRARY, "NEEDED")
    assert needed, "readelf printed no NEEDED entry"
    assert [name for name in needed if not C_LIBRARY.match(name)] == []


@pytest.mark.parametrize("kernels", ["plain", "avx2", "avx512"])
def test_kernels_share_no_function_with_other_instruction_sets(native_build: Path, kernels: str) -> None:
    if kernels != "plain" and platform.machine() != "x86_64":
        pytest.skip("an instruction set of x86-64")
    defined = symbols(native_build / OBJECTS / f"kernels_{kernels}.cpp.o", "--defined-only", "--extern-only", "-C")
    names = [" ".join(s[2:]) for s in defined]
    assert names == [f"flash_export::cpu::{kernels}Kernels()"]
