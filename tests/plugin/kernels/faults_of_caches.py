# SPDX-License-Identifier: Apache-2.0
"""One-line faults of what packed sequences and caches add to the kernels."""

from __future__ import annotations

from plugin.kernels.fault_bench import Fault

PAGED = "D 64 Dv 64 heads-first bottom-right page"
PACKED = "D 64 Dv 64 heads-first bottom-right length 64 length 1 length 3 length 1000 rows"

FAULTS_OF_CACHES = [
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
    Fault(
        name="appended_past_the_capacity",
        file="append.h",
        old="if (row >= fresh.count || before + row >= p.capacity) return;",
        new="if (row >= fresh.count) return;",
        caught_as=r"st\.global at append\.h:\d+ writes 16 bytes outside every tensor",
        unit="append",
        cases="append fp16 B 3 H 2 D 64 Dv 64 new 5 capacity 70 length 68",
    ),
    Fault(
        name="appended_to_a_page_that_is_none",
        file="append.h",
        old="      if (uint32_t(page) >= p.page_count) return;\n",
        new="",
        caught_as=r"(st\.global at append\.h:\d+ writes \d+ bytes outside every tensor|has other bytes)",
        unit="append",
        cases="broken",
    ),
    Fault(
        name="appended_over_the_last_key",
        file="append.h",
        old="int cache_row = before + row;",
        new="int cache_row = larger(before + row - 1, 0);",
        caught_as=r"has other bytes",
        unit="append",
        cases="append fp16 B 3 H 2 D 64 Dv 64",
    ),
    Fault(
        name="length_after_not_cut_at_the_capacity",
        file="append.h",
        old="uint32_t(smaller(before + fresh.count, p.capacity))",
        new="uint32_t(before + fresh.count)",
        caught_as=r"length after of batch 0 is 73",
        unit="append",
        cases="new 5 capacity 70 length 68",
    ),
]
