# SPDX-License-Identifier: Apache-2.0
"""scripts/kernel_table.py: it finds the hot loop, its gates can fail, and they hold for our library."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

FUNCTION = (
    "_ZN12flash_export7kernels13forwardKernelINS0_7ForwardI6__halfLi128ELi128ELi64ELi8ELNS0_8FeaturesE0EEEEEv"
    "NS0_13ForwardParamsE"
)
PLAIN = ("Half", 128, 128, 64, 8, "Plain")
NESTED_LOOPS = f"""
\t.section\t.text.{FUNCTION},"ax",@progbits
.L_x_1:
        /*0000*/                   IADD3 R1, R1, -0x1, RZ ;
.L_x_2:
        /*0010*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0020*/                   ISETP.GE.AND P0, PT, R1, RZ, PT ;
        /*0030*/                   FSEL R4, R4, -INF , P0 ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0050*/              @P1 HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/               @P0 BRA `(.L_x_3) ;
        /*0080*/               @P2 BRA `(.L_x_1) ;
.L_x_4:
        /*0090*/                   FADD R4, R4, R4 ;
        /*00a0*/                   BRA `(.L_x_4) ;
"""
COUNTS = re.compile(r" \|.*$", re.MULTILINE)
COPIES = f"""
\t.section\t.text.{FUNCTION},"ax",@progbits
.L_x_1:
        /*0000*/                   LDG.E.128.CONSTANT R4, [R4.64] ;
        /*0010*/                   STG.E.128 [R8.64], R4 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
"""
# A jump over what is seldom needed, one over the next tile's copy, a page looked up, and a way out at the end.
BRANCHES = f"""
\t.section\t.text.{FUNCTION},"ax",@progbits
.L_x_1:
        /*0000*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0010*/                   FADD R5, R5, R5 ;
        /*0020*/                   HMMA.16816.F32 R4, R20, R12, R4 ;
        /*0030*/                   HMMA.16816.F32 R4, R16, R10, R4 ;
        /*0040*/                   BSSY B0, `(.L_x_3) ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   FMUL R4, R4, R3 ;
        /*0070*/                   MUFU.EX2 R4, R4 ;
.L_x_2:
        /*0080*/              @!P2 BRA `(.L_x_3) ;
        /*0090*/                   LDG.E R6, [R2.64] ;
        /*00a0*/                   LDGSTS.E.128 [R2], [R4.64] ;
.L_x_3:
        /*00b0*/               @P0 EXIT ;
        /*00c0*/                   BRA `(.L_x_1) ;
"""


@pytest.fixture(scope="module")
def script(repo_root: Path) -> ModuleType:
    sys.path.insert(0, str(repo_root / "scripts"))
    try:
        return importlib.import_module("kernel_table")
    finally:
        sys.path.remove(str(repo_root / "scripts"))


def test_the_hot_loop_is_the_shortest_innermost_one_that_multiplies(script: ModuleType) -> None:
    (listing,) = script.read_listings(NESTED_LOOPS)
    assert listing.function == FUNCTION
    hot, other = script.loops_with(listing, "HMMA")
    assert [i.opcode for i in hot.path] == ["HMMA", "MUFU", "BRA"]
    assert [i.opcode for i in other.path] == ["HMMA", "ISETP", "FSEL", "BRA"]
    assert script.loops_with(listing, "FFMA") == []


def test_the_masked_loop_is_the_second_one_of_kernels_that_have_two(script: ModuleType) -> None:
    (listing,) = script.read_listings(NESTED_LOOPS)
    (plain,) = script.loop_of(listing, PLAIN, "sm_80")
    assert plain.masked == Counter(HMMA=1, ISETP=1, FSEL=1, BRA=1)
    assert script.ratio_of(plain.masked) == pytest.approx(8 / 4)
    (general,) = script.loop_of(listing, (*PLAIN[:5], "General"), "sm_80")
    assert general.masked == Counter()


def test_the_diagonal_is_the_smaller_a_part_the_longer_the_rows(script: ModuleType) -> None:
    # Of 8, 32 and 128 tiles of 128 queries the last n sees n * (n + 1) tiles of 64 keys, 2 n of them on the diagonal.
    shares = script.shares_of_the_diagonal([PLAIN, ("Half", 64, 64, 64, 4, "General")])
    assert shares == "22% at 1,024, 6% at 4,096, 2% at 16,384 tokens"


def test_what_most_tiles_jump_over_is_not_counted_and_what_every_tile_needs_is(script: ModuleType) -> None:
    (listing,) = script.read_listings(BRANCHES)
    (loop,) = script.loops_with(listing, "HMMA")
    assert loop.size == 13
    assert Counter(i.opcode for i in loop.path) == Counter(
        LDSM=1, FADD=1, HMMA=2, BSSY=1, BRA=3, LDG=1, LDGSTS=1, EXIT=1
    )
    (general,) = script.loops_with(listing, "HMMA", script.NEEDED - {"LDG", "LDGSTS"})
    assert "LDG" not in {i.opcode for i in general.path}


def test_a_lead_is_what_lies_between_a_fragment_and_the_product_that_takes_it(script: ModuleType) -> None:
    (listing,) = script.read_listings(BRANCHES)
    path = script.loops_with(listing, "HMMA")[0].path
    assert script.fragment_leads(path) == [2]  # R10 of R8 ... R11; the first product takes none of them


def test_the_ratio_is_of_the_busiest_other_unit(script: ModuleType) -> None:
    issue_bound = script.HotLoop(PLAIN, "sm_80", Counter(HMMA=128, MUFU=34, FADD=350))
    assert issue_bound.ratio == pytest.approx(8 * 128 / 512)
    exponential_bound = script.HotLoop(PLAIN, "sm_80", Counter(HMMA=128, MUFU=128))
    assert exponential_bound.ratio == pytest.approx(1.0)


def test_every_gate_can_fail(script: ModuleType) -> None:
    resources = [script.Resources(PLAIN, "sm_80", 185, 0, 0)]
    good = script.HotLoop(PLAIN, "sm_80", Counter(HMMA=128, LDSM=72, MUFU=32, FADD=220), leads=(7, 5))
    assert script.gate_faults([good], resources, 9 << 20) == []
    slow = script.HotLoop(PLAIN, "sm_80", Counter(HMMA=128, LDSM=80, MUFU=34, FADD=310), leads=(7, 1))
    assert script.gate_faults([slow], resources, 26 << 20) == [
        "the library has 27262976 bytes; the limit is 26214400",
        "Half128Plain: 552 instructions in the hot loop; the budget is 460",
        "Half128Plain: 80 ldsm in the hot loop; the budget is 72",
        "Half128Plain: 34 mufu in the hot loop; the budget is 32",
        "Half128Plain: a fragment is multiplied 1 instructions after its load; the gate is 5",
        "Half128Plain: tensor-bound ratio 1.86; the gate is 2.2",
    ]
    assert script.gate_faults([], resources, 0) == ["Half128Plain has no hot loop on sm_80"]
    narrow = dataclasses.replace(good, wide_stores=0)
    assert script.gate_faults([narrow], resources, 0) == ["Half128Plain on sm_80 stores no 16 bytes at once"]
    wide = ("Half", 128, 512, 64, 8, "Plain")
    resources = [script.Resources(wide, "sm_86", 185, 0, 0)]
    assert "more shared memory than a block may have on sm_86" in script.gate_faults([], resources, 0)[0]
    unknown = script.HotLoop(("Half", 96, 128, 64, 8, "Plain"), "sm_80", Counter(HMMA=1))
    assert "has no budget" in script.gate_faults([unknown], [], 0)[0]


def test_occupancy_is_bounded_by_shared_memory_too(script: ModuleType) -> None:
    assert script.shared_bytes(PLAIN) == 64 << 10
    few_registers = script.Resources(PLAIN, "sm_86", 32, 0, 0)
    assert (few_registers.blocks, script.blocks_at_a_time(few_registers)) == (8, 1)


def test_a_helper_has_the_loop_that_moves_its_data(script: ModuleType) -> None:
    (listing,) = script.read_listings(COPIES)
    (loop,) = script.loop_of(listing, ("Half", 0, 0, 0, 4, "Append"), "sm_90")
    assert (loop.total, loop.size, loop.wide_stores) == (3, 3, 1)
    assert script.loop_of(listing, PLAIN, "sm_90") == []


def test_a_row_has_every_figure_of_its_kernel_and_a_ratio_on_the_modelled_architecture_alone(
    script: ModuleType,
) -> None:
    for architecture, ratio, masked in (("sm_80", "2.00", "1.60"), ("sm_90", "-", "-")):
        loop = script.HotLoop(
            PLAIN,
            architecture,
            Counter(HMMA=128, LDSM=72, MUFU=32, FADD=280),
            600,
            (7, 9),
            1,
            Counter(HMMA=128, FSEL=512),
        )
        line = script.row(loop, script.Resources(PLAIN, architecture, 185, 0, 0))
        assert line == (
            "| Half128Plain | 128 x 64 | 8 | 185 | 64 KB | 1 | 512 | 600 | 128 | 72 | 32 | 0 "
            f"| {ratio} | 7, 8 | 640 | {masked} |\n"
        )


def test_the_gates_hold_and_the_page_is_what_the_script_writes(
    script: ModuleType, repo_root: Path, native_build: Path, tmp_path: Path
) -> None:
    if script.find_tool("cuobjdump") is None or script.find_tool("nvdisasm") is None:
        pytest.skip("cuobjdump and nvdisasm are not here; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    library = native_build / "lib" / "libflash_attention_plugin.so"
    command = [sys.executable, repo_root / "scripts" / "kernel_table.py", library, "--write", tmp_path / "kernels.md"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = (tmp_path / "kernels.md").read_text()
    kept = (repo_root / "docs" / "kernels.md").read_text()
    kernels = [*script.read_variants(script.VARIANTS.read_text()), *script.COMBINES, *script.APPENDS]
    for text in (made, kept):
        for variant in kernels:
            assert text.count(f"| {script.name(variant)} | ") == len(script.MULTIPROCESSORS), script.name(variant)
    # Another nvcc may count otherwise; what is listed and said is the same.
    assert COUNTS.sub("", made) == COUNTS.sub("", kept), f"make docs/kernels.md again with {command[1].name}"
