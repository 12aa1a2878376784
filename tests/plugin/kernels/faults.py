# SPDX-License-Identifier: Apache-2.0
"""One-line faults of the kernels that their tests must catch (fault_bench.py).

scripts/mutate_kernels.py runs them all, test_seeded_faults.py a sample.
"""

from __future__ import annotations

from plugin.kernels.fault_bench import Fault
from plugin.kernels.faults_of_caches import FAULTS_OF_CACHES
from plugin.kernels.faults_of_softmax import FAULTS_OF_SOFTMAX
from plugin.kernels.faults_of_the_door import FAULTS_OF_THE_DOOR

UNORDERED = "(race|still be reading|in flight|nothing has written)"
"""What a missing barrier is reported as: it depends on who comes first."""

WAIT_K = "    ops::copyAsyncWait<0>();\n    ops::syncThreads();  // K(n) is there"
WAIT_V = "    ops::copyAsyncWait<0>();\n    ops::syncThreads();  // V(n) is there"
REFILL = """    if (tile > tiles.begin) {
      // Only the last tile of all may lack keys, and no step loads that one.
      loadKeys(p, work, state, tile - 1, true);
    }
"""

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
        new="    loadValues(p, work, state, tile, true);\n" + WAIT_K,
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
        old="int const row_end = work.band.kv_length;",
        new="int const row_end = p.seqlen_kv;",
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
        name="half_of_a_row_not_summed",
        file="forward.h",
        old="return sum + ops::shuffleXor(sum, 2);",
        new="return sum;",
        caught_as=r"max error .* > ",
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
        name="sink_lost_by_a_split",
        file="combine.h",
        old="float const sum = keys + expPrecise(sink - against);",
        new="float const sum = keys;",
        caught_as=r"(max error .* > |lse of row \d+ is)",
        unit="combine",
        cases="sinks 1 no-lse splits",
    ),
    Fault(
        name="splits_not_weighted",
        file="combine.h",
        old="ops::multiplyAdd(part, weightOf(p, i * rows + number, against), total)",
        new="total + part",
        caught_as=r"max error .* > ",
        unit="combine",
        cases=SPLIT,
    ),
    Fault(
        name="splits_weighted_alike_whatever_their_sums",
        file="combine.h",
        old="return ops::loadFloat(p.partial_sum + number) *",
        new="return (ops::loadFloat(p.partial_sum + number) > 0.0f ? 1.0f : 0.0f) *",
        caught_as=r"(max error .* > |lse of row \d+ is)",
        unit="combine",
        cases="bias lowest-rows splits",
    ),
    Fault(
        name="row_without_keys_in_any_split_is_nan",
        file="combine.h",
        old="float const multiplier = keys == 0.0f ? 0.0f : ",
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
        old="loadKeys(p, work, state, tiles.end - 1, false);",
        new="loadKeys(p, work, state, all.end - 1, false);",
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
    *FAULTS_OF_SOFTMAX,
    *FAULTS_OF_CACHES,
    *FAULTS_OF_THE_DOOR,
]
