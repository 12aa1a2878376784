# SPDX-License-Identifier: Apache-2.0
"""One-line faults of the door and of offsets: sizes that it tells, alignment that it asks for, strides past an int."""

from __future__ import annotations

from plugin.kernels.fault_bench import Fault

OUTSIDE = r"(ld|st)\.global at \w+\.h:\d+ (reads|writes) \d+ bytes outside every tensor"
MISALIGNED = r"touches an address in '{}' that is not aligned to 16 bytes"

FAULTS_OF_THE_DOOR = [
    Fault(
        name="page_past_the_pool_allowed",
        file="dispatch.cpp",
        old="uint32_t(larger(a.page_count, 1) - 1)",
        new="uint32_t(larger(a.page_count, 1))",
        caught_as=r"reads \d+ bytes outside every tensor",
        unit="dispatch.cpp",
        cases="broken table Half64Paged",
    ),
    Fault(
        name="workspace_a_float_a_row_short",
        file="dispatch.cpp",
        old="kMaxHeadDim) + 2) * sizeof(float)",
        new="kMaxHeadDim) + 1) * sizeof(float)",
        caught_as=r"(splits use \d+ bytes of \d+|this is a guard band)",
        unit="dispatch.cpp",
        cases="exact workspace Float64General",
    ),
    Fault(
        name="parts_of_splits_behind_their_place",
        file="dispatch.cpp",
        old="params.partial_max + rows;",
        new="params.partial_max + rows + 1;",
        caught_as=r"st\.global at forward\.h:\d+ writes 4 bytes outside every tensor; this is a guard band",
        unit="dispatch.cpp",
        cases="exact workspace Float64General",
    ),
    Fault(
        name="append_ignores_the_value_caches_alignment",
        file="append.cpp",
        old="copiesVectors(a.value_cache, a.dtype, cache, a.v_head_dim)",
        new="true",
        caught_as=MISALIGNED.format("value_cache"),
        unit="append.cpp",
        cases="append fp16 B 3 H 2 D 64 Dv 64 new 5 capacity 70 length 0 length 33 length 62 shifted",
    ),
    Fault(
        name="step_to_a_batch_in_32_bits",
        file="forward.h",
        old="int64_t(batch) * tensor.batch_stride",
        new="int64_t(int32_t(uint32_t(batch) * uint32_t(tensor.batch_stride)))",
        caught_as=OUTSIDE.replace("(ld|st)", "(ld|st|cp)").replace("global", "(global|async)"),
        cases="far tensors' batches fp16",
    ),
    Fault(
        name="bias_of_a_head_in_32_bits",
        file="forward.h",
        old="int64_t(work.head) * p.bias_stride[1];",
        new="int64_t(int32_t(uint32_t(work.head) * uint32_t(p.bias_stride[1])));",
        caught_as=OUTSIDE,
        unit="forward_fp16_general",
        cases="far bias of heads fp16",
    ),
    Fault(
        name="bias_of_a_packed_head_in_32_bits",
        file="forward.h",
        old="int64_t(place.head) * p.bias_stride[1] +",
        new="int64_t(int32_t(uint32_t(place.head) * uint32_t(p.bias_stride[1]))) +",
        caught_as=OUTSIDE,
        unit="forward_fp16_general",
        cases="far bias of packed heads fp16",
    ),
    Fault(
        name="bias_of_a_key_in_32_bits",
        file="forward.h",
        old="ops::loadFloat(first + int64_t(n * 8 + e) * p.bias_stride[3]);",
        new="ops::loadFloat(first + int32_t(uint32_t(n * 8 + e) * uint32_t(p.bias_stride[3])));",
        caught_as=OUTSIDE,
        unit="forward_fp16_general",
        cases="far bias of keys fp16",
    ),
    Fault(
        name="row_of_the_page_table_in_32_bits",
        file="forward.h",
        old="p.page_table + int64_t(work.batch) * p.page_table_stride",
        new="p.page_table + int32_t(uint32_t(work.batch) * uint32_t(p.page_table_stride))",
        caught_as=OUTSIDE,
        unit="forward_fp16_paged",
        cases="far page table fp16",
    ),
    Fault(
        name="lse_of_a_packed_sequence_in_32_bits",
        file="sequences.h",
        old="return int64_t(head) * p.total_q + first_row + query;",
        new="return int32_t(uint32_t(head) * uint32_t(p.total_q)) + int64_t(first_row) + query;",
        caught_as=r"(outside every tensor|lse )",
        cases="far lse fp16",
    ),
    Fault(
        name="lse_of_a_split_sequence_in_32_bits",
        file="sequences.h",
        old="return int64_t(head) * p.total_q + first_row + query;",
        new="return int32_t(uint32_t(head) * uint32_t(p.total_q)) + int64_t(first_row) + query;",
        caught_as=r"(outside every tensor|lse )",
        unit="combine",
        cases="far lse of splits fp16",
    ),
]
