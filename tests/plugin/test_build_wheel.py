# SPDX-License-Identifier: Apache-2.0
"""scripts/build_wheel.py: it gives out no wheel that is too large, for this machine alone or with its libraries."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

TAGGED = "flash_export-0.1.0-py3-none-manylinux_2_35_x86_64.whl"


@pytest.fixture(scope="module")
def script(repo_root: Path) -> ModuleType:
    sys.path.insert(0, str(repo_root / "scripts"))
    try:
        return importlib.import_module("build_wheel")
    finally:
        sys.path.remove(str(repo_root / "scripts"))


def wheel(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("flash_trt/lib/libflash_attention_plugin.so", *members):
            archive.writestr(name, "")
    return path


def test_a_tagged_wheel_of_our_own_libraries_is_given_out(script: ModuleType, tmp_path: Path) -> None:
    assert script.find_fault(wheel(tmp_path / TAGGED)) == ""


def test_a_wheel_for_this_machine_alone_is_not(script: ModuleType, tmp_path: Path) -> None:
    alone = wheel(tmp_path / "flash_export-0.1.0-py3-none-linux_x86_64.whl")
    assert "no manylinux tag" in script.find_fault(alone)


def test_a_wheel_with_a_library_of_this_machine_is_not(script: ModuleType, tmp_path: Path) -> None:
    grafted = wheel(tmp_path / TAGGED, "flash_export.libs/libgomp-a34b3233.so.1.0.0")
    assert "libgomp-a34b3233" in script.find_fault(grafted)


def test_a_wheel_over_the_limit_is_not(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.LIMIT_BYTES == 30 << 20
    monkeypatch.setattr(script, "LIMIT_BYTES", 10)
    assert "the limit is 10" in script.find_fault(wheel(tmp_path / TAGGED))
