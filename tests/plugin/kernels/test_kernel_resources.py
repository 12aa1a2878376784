# SPDX-License-Identifier: Apache-2.0
"""scripts/kernel_resources.py: it reads cuobjdump's listing, and our kernels spill nowhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PLAIN = (
    "_ZN12flash_export7kernels13forwardKernelINS0_7ForwardI6__halfLi64ELi128ELi64ELi4ELNS0_8FeaturesE0EEEEEv"
    "NS0_13ForwardParamsE"
)
GENERAL = PLAIN.replace("6__half", "f").replace("FeaturesE0", "FeaturesE1")
LISTING = f"""
Fatbin elf code:
================
arch = sm_80
Resource usage:
 Common:
  GLOBAL:0
 Function {PLAIN}:
  REG:224 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:632 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function somebody_else:
  REG:10 STACK:800 SHARED:0 LOCAL:0 CONSTANT[0]:632 TEXTURE:0 SURFACE:0 SAMPLER:0
Fatbin elf code:
arch = sm_120
 Function {GENERAL}:
  REG:255 STACK:24 SHARED:0 LOCAL:0 CONSTANT[0]:632 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
VARIANTS = [("Half", 64, 128, 64, 4, "Plain"), ("Float", 64, 128, 64, 4, "General")]


@pytest.fixture(scope="module")
def script(repo_root: Path) -> ModuleType:
    path = repo_root / "scripts" / "kernel_resources.py"
    spec = importlib.util.spec_from_file_location("kernel_resources", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_it_reads_our_kernels_and_no_others(script: ModuleType) -> None:
    plain, general = script.read_usage(LISTING)
    assert (plain.variant, plain.architecture, plain.registers, plain.spills) == (VARIANTS[0], "sm_80", 224, False)
    assert (general.variant, general.architecture, general.registers, general.spills) == (
        VARIANTS[1],
        "sm_120",
        255,
        True,
    )
    assert plain.blocks == 2


def test_spills_and_missing_kernels_are_faults(script: ModuleType) -> None:
    faults = script.find_faults(script.read_usage(LISTING), VARIANTS)
    assert faults == [
        "Float64General on sm_120 spills: 255 registers, 24 bytes of stack, 0 of local memory",
        "Half64Plain is missing on sm_120",
        "Float64General is missing on sm_80",
    ]
    assert script.find_faults([], VARIANTS) == ["the library holds no kernel of ours"]


def test_a_kernel_that_no_table_lists_is_a_fault(script: ModuleType) -> None:
    assert script.strangers(LISTING) == []
    function = "_ZN12flash_export7kernels13forwardKernelINS0_6NobodyEEEvv"
    assert script.strangers(f" Function {function}:\n") == [f"{function} is a kernel that no table lists"]


def test_it_reads_which_kernels_the_ptx_has(script: ModuleType) -> None:
    ptx = f".target sm_80\n.visible .entry {PLAIN}(\n.target sm_90\n.weak .entry other(\n.entry {GENERAL}(\n"
    assert script.read_ptx(ptx) == {"compute_80": {VARIANTS[0]}, "compute_90": {VARIANTS[1]}}


def test_it_reads_the_table_of_variants(script: ModuleType) -> None:
    variants = script.read_variants(script.VARIANTS.read_text())
    assert variants[0] == ("Half", 32, 128, 64, 4, "Plain")
    assert len(variants) == script.VARIANTS.read_text().count("\nFLASH_VARIANT(")


@pytest.mark.parametrize("library_name", ["libflash_attention_plugin.so", "libflash_attention_door.so"])
def test_no_kernel_spills_on_any_architecture(
    script: ModuleType, repo_root: Path, native_build: Path, library_name: str
) -> None:
    if script.find_tool("cuobjdump") is None:
        pytest.skip("cuobjdump is not here; pip install nvidia-cuda-cuobjdump")
    library = native_build / "lib" / library_name
    done = subprocess.run(
        [sys.executable, str(repo_root / "scripts" / "kernel_resources.py"), str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for architecture in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120"):
        assert architecture in done.stdout.splitlines()[0]
    assert "HalfAppend" in done.stdout  # the cache forms of the plugin append, as does the door
