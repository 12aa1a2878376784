# SPDX-License-Identifier: Apache-2.0
"""One-line faults of the softmax: scales, maxima, and when a row is rescaled."""

from __future__ import annotations

from plugin.kernels.fault_bench import Fault

GROWING = "D 64 Dv 64 rows-first std 0.5 growth 4.25"
"""Every tile of 64 keys passes the maximum so far by 2^8.5 in every other row."""
HUGE = "D 64 Dv 64 rows-first scale 0.125 std 1.44e+08 key-std 12000"
"""Scores of 2^28: a rounding of them is past an exponential's range."""

FAULTS_OF_SOFTMAX = [
    Fault(
        name="output_not_rescaled",
        file="tile_softmax.h",
        old="out[m][n][h * 2 + 1] *= shrink;",
        new="",
        caught_as=r"max error .* > ",
        cases=GROWING,
    ),
    Fault(
        name="row_without_keys_is_nan",
        file="softmax.h",
        old="{kNegativeInfinity, kNegativeInfinity, 0.0f, 0.0f}",
        new="{kNegativeInfinity, kNegativeInfinity, kNegativeInfinity, 0.0f}",
        caught_as=r"output \d+ is -?nan",
        cases="D 64 Dv 64 rows-first bottom-right sinks",
    ),
    Fault(
        name="scale_one_percent_off",
        file="softmax.h",
        old="scale_log2(p.scale_log2), growth",
        new="scale_log2(p.scale_log2 * 1.01f), growth",
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
        name="shuffle_inside_a_branch",
        file="tile_softmax.h",
        old="largest = ops::maximum(largest, ops::shuffleXor(largest, 2));",
        new="if (ops::lane() != 9) largest = ops::maximum(largest, ops::shuffleXor(largest, 2));",
        caught_as=r"shfl\.xor at tile_softmax\.h:\d+ is divergent: others are in shfl\.xor at tile_softmax\.h:\d+",
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
        name="combined_row_without_keys_is_nan",
        file="softmax.h",
        old="return row_max == kNegativeInfinity ? 0.0f : row_max;",
        new="return row_max;",
        caught_as=r"output \d+ is -?nan",
        unit="combine",
        cases="bias hidden-rows splits",
    ),
    Fault(
        name="rows_hardly_ever_rescaled",
        file="forward_params.h",
        old="constexpr float kLazyGrowth = 8.0f;",
        new="constexpr float kLazyGrowth = 80.0f;",
        caught_as=r"output \d+ is -?(nan|inf)",
        unit="forward_fp16_general",
        cases="softcap 1000 std 0.5 growth 4.25",
    ),
    Fault(
        name="growth_not_in_the_units_of_the_scores",
        file="softmax.h",
        old=": row_max + growth;",
        new=": row_max + growth * 16.0f;",
        caught_as=r"output \d+ is -?(nan|inf)",
        cases=GROWING,
    ),
    Fault(
        name="weights_against_the_old_maximum",
        file="softmax.h",
        old="policy.offset(tile_maximum), sum * shrink}",
        new="offset, sum * shrink}",
        caught_as=r"(max error .* > |is -?(nan|inf))",
        cases=GROWING,
    ),
    Fault(
        name="sum_not_rescaled",
        file="softmax.h",
        old="sum * shrink};",
        new="sum};",
        caught_as=r"max error .* > ",
        cases=GROWING,
    ),
    Fault(
        name="lanes_rescale_on_their_own",
        file="tile_softmax.h",
        old="if (ops::anyLane(past_limit)) rescale",
        new="if (past_limit) rescale",
        caught_as=r"(is divergent: others are in|deadlock)",
        cases=GROWING,
    ),
    Fault(
        name="sink_of_nan_ignored",
        file="softmax.h",
        old="if (sink != kNegativeInfinity) {",
        new="if (sink > kNegativeInfinity) {",
        caught_as=r"sink nan of batch 0: output -?\d",
        cases="special sinks fp16 Plain splits 1",
    ),
    Fault(
        name="infinite_sink_less_itself",
        file="softmax.h",
        old="sink == with_sink ? 1.0f : Softmax::exp(sink - with_sink);",
        new="Softmax::exp(sink - with_sink);",
        caught_as=r"sink inf of batch 0: output -?nan",
        cases="special sinks fp16 Plain splits 1",
    ),
    Fault(
        name="sink_of_nan_shows_in_a_split_row_without_keys",
        file="combine.h",
        old="float const multiplier = keys == 0.0f ? 0.0f : ",
        new="float const multiplier = sum == 0.0f ? 0.0f : ",
        caught_as=r"sink .* of batch \d: output -?nan",
        unit="combine",
        cases="special sinks fp16 Plain splits 3",
    ),
    Fault(
        name="row_without_keys_has_the_lse_of_no_sink_in_a_split",
        file="combine.h",
        old="keys == 0.0f ? sink :",
        new="keys == 0.0f ? kNegativeInfinity :",
        caught_as=r"sink .* of batch \d: output -?0\.0+, lse -inf",
        unit="combine",
        cases="special sinks fp16 Plain splits 3",
    ),
    Fault(
        name="maximum_of_half_a_row",
        file="tile_softmax.h",
        old="        largest = ops::maximum(largest, ops::shuffleXor(largest, 1));\n",
        new="",
        caught_as=r"(max error .* > |is -?(nan|inf)|lse of row)",
        cases=GROWING,
    ),
    Fault(
        name="huge_scores_less_a_rounded_product",
        file="softmax.h",
        old="kSteep = 65536.0f;",
        new="kSteep = 1e30f;",
        caught_as=r"output \d+ is -?(nan|inf)",
        cases=HUGE,
    ),
    Fault(
        name="steep_rows_unlike_others_only_when_they_move",
        file="softmax.h",
        old="return steep(row_max) ? kNegativeInfinity : row_max + growth;",
        new="return row_max + growth;",
        caught_as=r"(max error .* > |is -?(nan|inf))",
        cases=HUGE,
    ),
    Fault(
        name="steep_rows_move_to_smaller_maxima",
        file="softmax.h",
        old="tile_maximum > limit && tile_maximum > maximum",
        new="tile_maximum > limit",
        caught_as=r"(max error .* > |is -?(nan|inf))",
        cases=HUGE,
    ),
    Fault(
        name="distances_of_half_a_steep_row",
        file="tile_softmax.h",
        old="            s[m][n][h * 2 + 1] -= rows[m][h].maximum;\n",
        new="",
        caught_as=r"(max error .* > |is -?(nan|inf))",
        cases=HUGE,
    ),
    Fault(
        name="long_sums_key_by_key_in_fp32",
        file="products.h",
        old="sums[m][i / 4][i % 4] = 0.0f;",
        new="sums[m][i / 4][i % 4] = o[m][first + i / 4][i % 4], o[m][first + i / 4][i % 4] = 0.0f;",
        caught_as=r"max error .* > ",
        unit="forward_fp32",
        cases="Skv 4096 D 64",
    ),
]
