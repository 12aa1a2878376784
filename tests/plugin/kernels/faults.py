# SPDX-License-Identifier: Apache-2.0
"""One-line faults of the kernels, and the bench that says whether the tests catch one.

The emulation and forward_tests are compiled once, with a table of variants cut down to two head dims; the one kernel
source that a fault sits in is compiled again for each, and forward_tests runs the few cases that it should show in.
scripts/mutate_kernels.py runs them all, test_seeded_faults.py a sample.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
KERNELS = REPOSITORY / "plugin/kernels"
TESTS = REPOSITORY / "tests/plugin/kernels"
UNITS = ["forward_fp16_plain", "forward_fp16_paged", "forward_fp16_general", "forward_fp32", "combine"]
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off"]
SMALL_TABLE = re.compile(r"^FLASH_VARIANT\((Half|Float), (32|64),.*\n", re.MULTILINE)
SEEDS = ("1", "7")
"""Two schedules a fault: a race that shows only when the right thread comes first is no catch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One edit to the kernels.

    Args:
        name: what is wrong.
        file: below plugin/kernels.
        old: text that is there once.
        new: what stands in its place.
        caught_as: what the report must say (a regular expression).
        unit: the kernel source to compile with it.
        cases: forward_tests runs those whose description holds this.
    """

    name: str
    file: str
    old: str
    new: str
    caught_as: str
    unit: str = "forward_fp16_plain"
    cases: str = "D 64 Dv 64 heads-first bottom-right"


UNORDERED = "(race|still be reading|in flight|nothing has written)"
"""What a missing barrier is reported as: it depends on who comes first."""

WAIT_K = "    ops::copyAsyncWait<0>();\n    ops::syncThreads();  // K(n) is there"
WAIT_V = "    ops::copyAsyncWait<0>();\n    ops::syncThreads();  // V(n) is there"
REFILL = """    if (tile > tiles.begin) {
      // Only the last tile of all may lack keys, and no step loads that one.
      loadKeys(p, work, tile - 1, true);
    }
"""

PAGED = "D 64 Dv 64 heads-first bottom-right page"
PACKED = "D 64 Dv 64 heads-first bottom-right length 64 length 1 length 3 length 1000 rows"
SPLIT = "Sq 3 Skv 259 D 64 Dv 64 heads-first bottom-right splits"

FAULTS = [
    Fault(
        name="missing_wait_for_keys",
        file="forward.h",
        old=WAIT_K,
        new="    ops::syncThreads();  // K(n) is there",
        caught_as=r"ldmatrix at products\.h:\d+ reads shared address \d+ while a copy .*missing wait",
    ),
    Fault(
        name="missing_wait_for_values",
        file="forward.h",
        old=WAIT_V,
        new="    ops::syncThreads();  // V(n) is there",
        caught_as=r"ldmatrix\.trans at products\.h:\d+ reads .*missing wait",
    ),
    Fault(
        name="missing_barrier_before_keys",
        file="forward.h",
        old=WAIT_K,
        new="    ops::copyAsyncWait<0>();  // K(n) is there",
        caught_as=r"(ldmatrix at products|cp\.async at tile_io)\.h:\d+ .*" + UNORDERED,
    ),
    Fault(
        name="missing_barrier_before_values",
        file="forward.h",
        old=WAIT_V,
        new="    ops::copyAsyncWait<0>();  // V(n) is there",
        caught_as=r"(ldmatrix\.trans at products|cp\.async at tile_io)\.h:\d+ .*" + UNORDERED,
    ),
    Fault(
        name="keys_refilled_too_early",
        file="forward.h",
        old=WAIT_V,
        new=REFILL + WAIT_V,
        caught_as=r"cp\.async at tile_io\.h:\d+ overwrites .*may still be reading",
    ),
    Fault(
        name="values_refilled_too_early",
        file="forward.h",
        old=WAIT_K,
        new="    loadValues(p, work, tile, true);\n" + WAIT_K,
        caught_as=r"cp\.async at tile_io\.h:\d+ overwrites ",
    ),
    Fault(
        name="missing_syncwarp_after_staging",
        file="forward.h",
        old="    ops::syncWarp();  // the warp's rows are staged\n",
        new="",
        caught_as=r"ld\.shared at tile_io\.h:\d+ reads .*(race|nothing has written)",
    ),
    Fault(
        name="unpredicated_output_store",
        file="tile_io.h",
        old="if (row0 + row < row_end && count > 0) {",
        new="if (count > 0) {",
        caught_as=r"st\.global at tile_io\.h:\d+ writes 16 bytes outside every tensor",
    ),
    Fault(
        name="unpredicated_lse_store",
        file="forward.h",
        old="if (p.lse != nullptr && there && (ops::lane() & 3) == 0) {",
        new="if (p.lse != nullptr && (ops::lane() & 3) == 0) {",
        caught_as=r"st\.global at forward\.h:\d+ writes 4 bytes outside every tensor",
    ),
    Fault(
        name="unpredicated_load",
        file="tile_io.h",
        old="bool const there = count > 0 && row0 + row < row_end;\n"
        "      auto const* const from = there ? rows.at(row0 + row) + chunk * Shape::kChunkElements : rows.first;\n"
        "      ops::copyAsync(",
        new="bool const there = count > 0;\n"
        "      auto const* const from = there ? rows.at(row0 + row) + chunk * Shape::kChunkElements : rows.first;\n"
        "      ops::copyAsync(",
        caught_as=r"cp\.async at tile_io\.h:\d+ reads 16 bytes outside every tensor",
    ),
    Fault(
        name="unpredicated_load_past_a_length",
        file="forward.h",
        old="rows, row0, work.band.kv_length, head_dim",
        new="rows, row0, p.seqlen_kv, head_dim",
        caught_as=r"output \d+ is -?nan",
        cases="D 64 Dv 64 rows-first length",
    ),
    Fault(
        name="unpredicated_bias",
        file="forward.h",
        old="row < work.row_end && first_key + n * 8 + e < work.band.kv_length;",
        new="first_key + n * 8 + e < work.band.kv_length;",
        caught_as=r"ld\.global at forward\.h:\d+ reads 2 bytes outside every tensor",
        unit="forward_fp16_general",
        cases="D 64 Dv 64 rows-first bias holes",
    ),
    Fault(
        name="padding_of_the_head_dim_not_zeroed",
        file="tile_io.h",
        old="if (i < count) chunk.w",
        new="chunk.w",
        caught_as=r"(ld\.global at tile_io\.h:\d+ reads 2 bytes outside every tensor|is -?nan)",
        unit="forward_fp16_general",
        cases="D 33 Dv 33",
    ),
    Fault(
        name="mask_one_key_late",
        file="geometry.h",
        old="smaller(band.kv_length, row + band.upper + 1) - key0",
        new="smaller(band.kv_length, row + band.upper + 2) - key0",
        caught_as=r"max error .* > ",
    ),
    Fault(
        name="mask_one_key_early",
        file="geometry.h",
        old="return {row + band.lower - key0",
        new="return {row + band.lower + 1 - key0",
        caught_as=r"max error .* > ",
        cases="D 64 Dv 64 rows-first diagonal left",
    ),
    Fault(
        name="tail_not_masked",
        file="geometry.h",
        old="bool needsMask(int tile) const { return tile < full_begin || tile >= full_end; }",
        new="bool needsMask(int tile) const { return tile < full_begin; }",
        caught_as=r"cp\.async at tile_io\.h:\d+ reads 16 bytes outside every tensor",
        cases="Sq 131 Skv 133 D 64 Dv 64 rows-first",
    ),
    Fault(
        name="last_tile_skipped",
        file="geometry.h",
        old="int const end = (larger(last_row.last, 0) + tile_kv - 1) / tile_kv;",
        new="int const end = larger(last_row.last, 0) / tile_kv;",
        caught_as=r"max error .* > ",
    ),
    Fault(
        name="output_not_rescaled",
        file="forward.h",
        old="state.out[m][n][h * 2 + 1] *= shrink;",
        new="",
        caught_as=r"max error .* > ",
    ),
    Fault(
        name="half_of_a_row_not_summed",
        file="forward.h",
        old="    sum += ops::shuffleXor(sum, 2);\n",
        new="",
        caught_as=r"max error .* > ",
    ),
    Fault(
        name="row_without_keys_is_nan",
        file="softmax.h",
        old="return row_max == kNegativeInfinity ? 0.0f : row_max;",
        new="return row_max;",
        caught_as=r"output \d+ is -?nan",
        cases="D 64 Dv 64 rows-first bottom-right sinks",
    ),
    Fault(
        name="scale_one_percent_off",
        file="softmax.h",
        old="scale_log2(p.scale_log2) {}",
        new="scale_log2(p.scale_log2 * 1.01f) {}",
        caught_as=r"max error .* > ",
    ),
    Fault(
        name="log2_e_folded_into_a_lowest_bias",
        file="softmax.h",
        old="FLASH_DEVICE float weight(float score, float offset) const { return exp(score - offset); }\n"
        "  FLASH_DEVICE float shrink(float old_max, float new_max) const { return exp(old_max - new_max); }\n"
        "  FLASH_DEVICE float natural",
        new="FLASH_DEVICE float weight(float score, float offset) const {\n"
        "    return ops::exp2Approx(score * kLog2E - offset * kLog2E);\n  }\n"
        "  FLASH_DEVICE float shrink(float old_max, float new_max) const { return exp(old_max - new_max); }\n"
        "  FLASH_DEVICE float natural",
        caught_as=r"output \d+ is -?nan",
        unit="forward_fp16_general",
        cases="D 64 Dv 64 rows-first bias lowest-rows fp32",
    ),
    Fault(
        name="heads_of_a_group_taken_round_robin",
        file="forward.h",
        old="int const kv_head = w.head / p.group;",
        new="int const kv_head = w.head % p.kv_heads;",
        caught_as=r"max error .* > ",
        unit="forward_fp32",
        cases="fp32 B 1 Hq 6 Hkv 3",
    ),
    Fault(
        name="no_swizzle",
        file="geometry.h",
        old="return chunks_per_row >= 8 ? uint32_t(row) & 7u : (uint32_t(row) >> 1) & 3u;",
        new="return chunks_per_row >= 8 ? uint32_t(row) & 0u : (uint32_t(row) >> 1) & 3u;",
        caught_as=r"\d+ bank conflicts of ldmatrix",
    ),
    Fault(
        name="shuffle_inside_a_branch",
        file="forward.h",
        old="new_max = ops::maximum(new_max, ops::shuffleXor(new_max, 2));",
        new="if (ops::lane() != 9) new_max = ops::maximum(new_max, ops::shuffleXor(new_max, 2));",
        caught_as=r"shfl\.xor at forward\.h:\d+ is divergent: others are in shfl\.xor at forward\.h:\d+",
    ),
    Fault(
        name="exponential_of_the_fast_unit_in_fp32",
        file="softmax.h",
        old="static FLASH_DEVICE float exp(float x) { return expPrecise(x); }",
        new="static FLASH_DEVICE float exp(float x) { return ops::exp2Approx(x * 1.4427f); }",
        caught_as=r"max error .* > ",
        unit="forward_fp32",
    ),
    Fault(
        name="sink_lost_by_a_split",
        file="combine.h",
        old="float sum = expPrecise(sink - against);",
        new="float sum = 0.0f;",
        caught_as=r"(max error .* > |lse of row \d+ is)",
        unit="combine",
        cases="sinks 1 no-lse splits",
    ),
    Fault(
        name="splits_not_weighted",
        file="combine.h",
        old="ops::multiplyAdd(part, expPrecise(lseOf(p, rows, number, i) - against), total)",
        new="total + part",
        caught_as=r"max error .* > ",
        unit="combine",
        cases=SPLIT,
    ),
    Fault(
        name="row_without_keys_in_any_split_is_nan",
        file="combine.h",
        old="float const multiplier = sum == 0.0f ? 0.0f : ",
        new="float const multiplier = ",
        caught_as=r"output \d+ is -?nan",
        unit="combine",
        cases="bias hidden-rows splits",
    ),
    Fault(
        name="splits_overlap",
        file="geometry.h",
        old="smaller(begin + each, all.end)",
        new="smaller(begin + each + 1, all.end)",
        caught_as=r"max error .* > ",
        cases=SPLIT,
    ),
    Fault(
        name="first_tile_of_every_split_is_the_last_of_all",
        file="forward.h",
        old="loadKeys(p, work, tiles.end - 1, false);",
        new="loadKeys(p, work, all.end - 1, false);",
        caught_as=r"(max error .* > |is -?nan)",
        cases=SPLIT,
    ),
    Fault(
        name="splits_write_over_each_other",
        file="forward.h",
        old="int64_t const part = int64_t(work.split) *",
        new="int64_t const part = int64_t(0) *",
        caught_as=r"(max error .* > |is -?nan)",
        cases=SPLIT,
    ),
    Fault(
        name="unpredicated_part_of_a_split",
        file="forward.h",
        old="        if (row >= work.row_end) continue;\n",
        new="",
        caught_as=r"st\.global at forward\.h:\d+ writes 4 bytes outside every tensor",
        cases=SPLIT,
    ),
    Fault(
        name="packed_rows_masked_as_queries",
        file="forward.h",
        old="visibleKeys(work.band, placeOf(rowOf(work, m, j >> 1), p.pack).query, key0)",
        new="visibleKeys(work.band, rowOf(work, m, j >> 1), key0)",
        caught_as=r"max error .* > ",
        cases="Hq 6 Hkv 1 Sq 4 ",
    ),
    Fault(
        name="packed_heads_share_a_bias",
        file="forward.h",
        old="head + int64_t(place.head) * p.bias_stride[1] +",
        new="head +",
        caught_as=r"max error .* > ",
        unit="forward_fp16_general",
        cases="bias full splits",
    ),
    Fault(
        name="page_found_by_its_first_row",
        file="geometry.h",
        old="return {key >> page_bits, key & ((1 << page_bits) - 1)};",
        new="return {(key >> page_bits) + (key % 2), key & ((1 << page_bits) - 1)};",
        caught_as=r"(max error .* > |is -?nan|outside every tensor)",
        unit="forward_fp16_paged",
        cases=PAGED,
    ),
    Fault(
        name="rows_of_a_page_not_counted_from_its_start",
        file="geometry.h",
        old="return {key >> page_bits, key & ((1 << page_bits) - 1)};",
        new="return {key >> page_bits, key};",
        caught_as=r"(max error .* > |is -?nan|outside every tensor)",
        unit="forward_fp16_paged",
        cases=PAGED,
    ),
    Fault(
        name="page_past_the_last_key_followed",
        file="tile_io.h",
        old="    auto const* const from = there ? rows.at(row0 + row) + chunk * Shape::kChunkElements : rows.first;\n"
        "    uint32_t const to",
        new="    auto const* const from = rows.at(row0 + row) + chunk * Shape::kChunkElements;\n    uint32_t const to",
        caught_as=r"ld\.global at tile_io\.h:\d+ reads 4 bytes outside every tensor",
        unit="forward_fp16_paged",
        cases=PAGED,
    ),
    Fault(
        name="every_batch_reads_the_first_table",
        file="forward.h",
        old="p.page_table + int64_t(work.batch) * p.page_table_stride",
        new="p.page_table",
        caught_as=r"(max error .* > |is -?nan)",
        unit="forward_fp16_paged",
        cases="Hq 6 Hkv 2 Sq 4 Skv 192 D 64 Dv 64 rows-first",
    ),
    Fault(
        name="step_to_a_batch_beside_pages",
        file="forward.h",
        old="int const kv_batch = paged(p) ? 0 : w.batch;",
        new="int const kv_batch = w.batch;",
        caught_as=r"(max error .* > |is -?nan|outside every tensor)",
        unit="forward_fp16_paged",
        cases="Hq 6 Hkv 2 Sq 4 Skv 192 D 64 Dv 64 rows-first",
    ),
    Fault(
        name="rows_of_the_next_sequence_written",
        file="forward.h",
        old="w.row_end = smaller(w.row0 + kTileQ, queries.count * p.pack);",
        new="w.row_end = smaller(w.row0 + kTileQ, p.seqlen_q * p.pack);",
        caught_as=r"(max error .* > |is -?nan|was written|outside every tensor|lse of row)",
        cases=PACKED,
    ),
    Fault(
        name="diagonal_of_the_longest_sequence",
        file="forward.h",
        old="p.window_right, queries.count, keys.count);",
        new="p.window_right, p.seqlen_q, keys.count);",
        caught_as=r"(max error .* > |lse of row)",
        cases=PACKED,
    ),
    Fault(
        name="lse_of_a_packed_sequence_in_another_ones_place",
        file="sequences.h",
        old="return int64_t(head) * p.total_q + first_row + query;",
        new="return int64_t(head) * p.total_q + query;",
        caught_as=r"(was written|lse of row)",
        cases=PACKED,
    ),
    Fault(
        name="combined_rows_past_a_sequence_written",
        file="combine.h",
        old="    if (query >= queries.count) return;\n",
        new="",
        caught_as=r"(max error .* > |is -?nan|was written|lse of row|outside every tensor)",
        unit="combine",
        cases="rows-first rows 1 rows 0 rows 3",
    ),
]


def copy_kernels(folder: Path) -> Path:
    """A copy of the kernels' sources with few variants, to compile quickly."""
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    table = (KERNELS / "variants.inc").read_text()
    (kernels / "variants.inc").write_text("".join(match[0] for match in SMALL_TABLE.finditer(table)))
    return kernels


def compile_source(source: Path, target: Path, kernels: Path) -> None:
    """Compiles one C++ file; ``kernels`` is the folder its includes come from."""
    command = ["g++", *FLAGS, f"-I{kernels}", "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def compile_unit(unit: str, kernels: Path, folder: Path) -> Path:
    """Compiles one kernel source for the emulation and returns its object file."""
    wrapper = folder / f"{unit}.cpp"
    wrapper.write_text(f'#include "{kernels}/{unit}.cu"\n')
    compile_source(wrapper, folder / f"{unit}.o", kernels)
    return folder / f"{unit}.o"


def run_cases(objects: list[Path], folder: Path, cases: str, seed: str) -> subprocess.CompletedProcess[str]:
    """Links forward_tests of these objects, once, and runs it."""
    program = folder / "forward_tests"
    if not program.exists():
        subprocess.run(["g++", *map(str, objects), "-o", str(program)], check=True)
    environment = {"FLASH_EMULATION_SEED": seed}
    return subprocess.run([program, cases], env=environment, capture_output=True, text=True, timeout=60, check=False)


class Bench:
    """Sound objects in ``folder``; raises CalledProcessError where they do not compile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        kernels = copy_kernels(folder)
        self._objects = {unit: compile_unit(unit, kernels, folder) for unit in UNITS}
        sources = [kernels / "dispatch.cpp", *(kernels / "emulation").glob("*.cpp")]
        for source in [*sources, *(TESTS / f"{name}.cpp" for name in ("judge", "problem", "test_forward"))]:
            self._objects[source.stem] = folder / f"{source.stem}.o"
            compile_source(source, self._objects[source.stem], kernels)

    def why_sound_fails(self, cases: str) -> str:
        """What the cases report without any fault; empty when they pass."""
        sound = run_cases(list(self._objects.values()), self._folder, cases, SEEDS[0])
        return "" if sound.returncode == 0 else f"{cases}: {sound.stdout}"

    def why_missed(self, fault: Fault) -> str:
        """Empty when the fault is caught with every schedule and reported as it should be."""
        folder = self._folder / fault.name
        folder.mkdir()
        kernels = copy_kernels(folder)
        source = (kernels / fault.file).read_text()
        if source.count(fault.old) != 1:
            return f"{fault.file} holds this {source.count(fault.old)} times: {fault.old}"
        (kernels / fault.file).write_text(source.replace(fault.old, fault.new))
        objects = self._objects | {fault.unit: compile_unit(fault.unit, kernels, folder)}
        for seed in SEEDS:
            result = run_cases(list(objects.values()), folder, fault.cases, seed)
            if result.returncode != 1:
                return f"not caught with schedule {seed}: {result.stdout}{result.stderr}"
            if not re.search(fault.caught_as, result.stdout):
                return f"reported as something else with schedule {seed}: {result.stdout}"
        return ""
