# SPDX-License-Identifier: Apache-2.0
"""The operator's contract as one table: every implementation runs every row, or says why it cannot.

Sizes are odd on purpose: no multiple of a tile, Sq != Skv, one more and one less than a power of two. To cover a new
attribute, add it to ``Case`` and give it rows with at least two values; test_contract.py asks for them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

BiasKind = Literal["random", "holes", "finfo_min_row", "hidden_rows", "hidden_key"]
BiasShape = tuple[int, int, int, int]
ODD_POSITION = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. Fields are the operator's; see docs/op.md.

    Args:
        scale: None is 1/sqrt(head_dim).
        score_std: the query is scaled so that the scores have this standard deviation; at 1 a softmax is too flat
            to show a wrong scale or mask.
        bias_kind: random numbers; ``holes``: -inf here and there; ``finfo_min_row``: rows full of the lowest finite
            number (the mean of V follows); ``hidden_rows``: rows full of -inf (0 follows); ``hidden_key``: -inf at the
            key of ``odd_at``.
        bias_fp32: an fp32 bias beside fp16 or bf16 queries.
        kv_lengths: ``[B]`` or ``[1]``, unclamped.
        sinks: 0 none, 1 one for all heads, 2 one a head.
        sink_mean: what the random sinks lie around; far off, a maximum without them overflows.
        value_mean: what the values lie around; where they have one sign, a sum over many keys shows how it is made.
        nan_past_length: key and value are NaN from the length on.
        odd_at: one element of this tensor, or of both, at ODD_POSITION of its sequence, is no finite number; it must
            show in what it takes part in, and nowhere else.
        odd_number: which number.
        nan_where_unread: the neutral constants of inputs that are off hold NaN; nobody may read them.
    """

    name: str
    operator: str = "FlashAttention"
    dtype: str = "fp32"
    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2
    seqlen_q: int = 37
    seqlen_kv: int = 53
    head_dim: int = 40
    v_head_dim: int | None = None
    layout: int = 0
    scale: float | None = None
    softcap: float = 0.0
    causal: int = 0
    diagonal: int = 0
    window_left: int = -1
    window_right: int = -1
    bias_shape: BiasShape | None = None
    bias_kind: BiasKind = "random"
    bias_fp32: bool = False
    kv_lengths: tuple[int, ...] | None = None
    sinks: int = 0
    sink_mean: float = 0.0
    value_mean: float = 0.0
    score_std: float = 2.5
    nan_past_length: bool = False
    odd_at: Literal["", "query", "key", "value", "key_and_value"] = ""
    odd_number: float = math.nan
    nan_where_unread: bool = False

    @property
    def dv(self) -> int:
        """The value's head dim."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """The scale that is written on the node, an fp32 number."""
        return float(np.float32(self.head_dim**-0.5 if self.scale is None else self.scale))

    @property
    def is_odd_behind_bias(self) -> bool:
        """Whether a bias of -inf hides a key that, or whose value, is no finite number from some query."""
        return self.odd_at not in ("", "query") and self.bias_kind in ("holes", "hidden_rows", "hidden_key")

    @property
    def is_odd_value_hidden(self) -> bool:
        """Whether some query does not see the key of such a value; lengths, which all obey, left aside."""
        band = self.causal or max(self.window_left, self.window_right) >= 0
        return "value" in self.odd_at and (bool(band) or self.is_odd_behind_bias)

    def attributes(self) -> dict[str, int | float]:
        """The node's numeric attributes, all of them."""
        return {
            "layout": self.layout,
            "q_num_heads": self.heads_q,
            "kv_num_heads": self.heads_kv,
            "causal": self.causal,
            "diagonal": self.diagonal,
            "window_left": self.window_left,
            "window_right": self.window_right,
            "has_bias": int(self.bias_shape is not None),
            "has_kv_lengths": int(self.kv_lengths is not None),
            "has_sinks": int(self.sinks > 0),
            "scale": self.softmax_scale,
            "softcap": self.softcap,
        }


def plain(name: str, **fields: object) -> Case:
    """A row of FlashAttention."""
    return Case(name=name, operator="FlashAttention", **fields)  # type: ignore[arg-type]


def ex(name: str, **fields: object) -> Case:
    """A row of FlashAttentionEx: side inputs and the log-sum-exp."""
    return Case(name=name, operator="FlashAttentionEx", **fields)  # type: ignore[arg-type]


def packed(name: str, **fields: object) -> Case:
    """A row of FlashAttentionPacked: one sequence length, one head dim, layout 0."""
    seqlen = fields.pop("seqlen")
    return Case(name=name, operator="FlashAttentionPacked", seqlen_q=seqlen, seqlen_kv=seqlen, **fields)  # type: ignore[arg-type]


DTYPE_ROWS = [
    plain(f"{dtype}_{mask}", dtype=dtype, seqlen_q=97, seqlen_kv=131, head_dim=64, **fields)
    for dtype in ("fp32", "fp16", "bf16")
    for mask, fields in (
        ("full", {}),
        ("top_left", {"causal": 1}),
        ("bottom_right", {"causal": 1, "diagonal": 1}),
    )
]

HEAD_DIM_ROWS = [
    plain("head_dim_1", head_dim=1, scale=0.7, dtype="fp16"),
    plain("head_dim_15", head_dim=15, dtype="bf16"),
    plain("head_dim_15_fp32", head_dim=15, layout=1),
    plain("head_dim_80", head_dim=80, dtype="fp16", causal=1),
    plain("head_dim_128", head_dim=128, dtype="bf16", seqlen_q=65, seqlen_kv=129, causal=1, diagonal=1),
    plain("head_dim_192_v_128", head_dim=192, v_head_dim=128, dtype="fp16", heads_q=1, heads_kv=1, causal=1),
    plain("head_dim_256", head_dim=256, dtype="fp16", heads_q=1, heads_kv=1, seqlen_q=63, seqlen_kv=66),
    plain("head_dim_256_fp32", head_dim=256, heads_q=1, heads_kv=1, seqlen_q=9, seqlen_kv=66, causal=1),
    plain("v_narrower", head_dim=64, v_head_dim=24, dtype="fp16", layout=1),
    plain("v_wider", head_dim=24, v_head_dim=72, dtype="fp16"),
    plain("v_wider_fp32", head_dim=3, v_head_dim=130, batch=1),
]

SIZE_ROWS = [
    plain("one_key", seqlen_q=5, seqlen_kv=1, dtype="fp16"),
    plain("one_query_one_key", seqlen_q=1, seqlen_kv=1, batch=1, head_dim=64, dtype="fp16"),
    plain("decode_top_left", seqlen_q=1, seqlen_kv=257, causal=1, dtype="fp16", head_dim=64),
    plain("decode_bottom_right", seqlen_q=1, seqlen_kv=257, causal=1, diagonal=1, dtype="bf16", head_dim=64),
    plain("one_past_a_tile", seqlen_q=129, seqlen_kv=65, dtype="fp16", head_dim=64, batch=1),
    plain("exact_tiles", seqlen_q=128, seqlen_kv=128, dtype="fp16", head_dim=64, batch=1, causal=1),
    plain("one_short_of_a_tile", seqlen_q=127, seqlen_kv=191, dtype="bf16", head_dim=64, batch=1, causal=1),
    plain("many_tiles", seqlen_q=200, seqlen_kv=413, dtype="fp16", head_dim=64, batch=1, causal=1, diagonal=1),
    plain("thousands_of_keys", seqlen_q=33, seqlen_kv=4100, head_dim=16, batch=1, value_mean=2.0, score_std=0.5),
    plain("thousands_of_keys_for_one_query", seqlen_q=1, seqlen_kv=4100, head_dim=64, value_mean=2.0, score_std=0.5),
    plain("many_tiles_fp32", seqlen_q=130, seqlen_kv=300, head_dim=64, batch=1, heads_q=1, heads_kv=1),
    plain("more_queries_than_keys_top_left", seqlen_q=71, seqlen_kv=19, causal=1, dtype="fp16"),
    plain("more_queries_than_keys_bottom_right", seqlen_q=71, seqlen_kv=19, causal=1, diagonal=1, dtype="fp16"),
    plain("more_queries_than_keys_bottom_right_fp32", seqlen_q=71, seqlen_kv=19, causal=1, diagonal=1, layout=1),
    plain("no_batch", batch=0, dtype="fp16"),
    plain("no_query", seqlen_q=0, dtype="fp16", causal=1),
    plain("no_query_heads_first", seqlen_q=0, layout=1),
    plain("no_key", seqlen_kv=0, dtype="fp16"),
    plain("no_key_bottom_right", seqlen_kv=0, causal=1, diagonal=1, layout=1),
]

HEAD_ROWS = [
    plain("gqa", heads_q=6, heads_kv=2, dtype="fp16", causal=1),
    plain("gqa_heads_first", heads_q=6, heads_kv=3, dtype="bf16", layout=1),
    plain("gqa_fp32", heads_q=4, heads_kv=2, causal=1, diagonal=1, batch=1),
    plain("mqa", heads_q=5, heads_kv=1, dtype="fp16", batch=3),
    plain("mqa_v_wider", heads_q=3, heads_kv=1, dtype="fp16", v_head_dim=64, layout=1),
]

SCORE_ROWS = [
    plain("scale_custom", scale=0.1, dtype="fp16"),
    plain("scale_one", scale=1.0, dtype="fp32", causal=1),
    plain("scale_zero_is_the_mean", scale=0.0, dtype="fp16"),
    plain("scale_negative", scale=-0.3, dtype="fp32"),
    plain("sharp_scores", score_std=20.0, dtype="fp16", causal=1),
    plain("huge_scores_fp32", score_std=300.0, head_dim=64),
    plain("huge_scores_bf16", score_std=300.0, head_dim=64, dtype="bf16"),
    plain("nan_in_a_query", odd_at="query", dtype="fp16", causal=1),
    plain("nan_in_a_query_fp32", odd_at="query", layout=1),
    plain("nan_in_a_key", odd_at="key", dtype="bf16", causal=1),
    plain("nan_in_a_key_fp32", odd_at="key", causal=1, heads_q=4),
    plain("nan_in_a_value", odd_at="value", dtype="fp16"),
    ex("nan_in_a_key_shows_in_the_lse", odd_at="key", dtype="fp16", causal=1),
    plain("softcap", softcap=5.0, dtype="fp16"),
    plain("softcap_causal_fp32", softcap=1.5, causal=1, diagonal=1),
    plain("softcap_bf16", softcap=30.0, dtype="bf16", layout=1, score_std=20.0),
]

ODD_VALUE_ROWS = [
    plain("nan_value_causal", odd_at="value", causal=1),
    plain("nan_value_causal_fp16", odd_at="value", causal=1, diagonal=1, seqlen_q=53, dtype="fp16", layout=1),
    plain("nan_value_causal_v_narrower", odd_at="value", causal=1, v_head_dim=3, heads_q=4),
    plain("nan_value_window", odd_at="value", window_left=9, seqlen_q=150, seqlen_kv=150, heads_q=4, batch=1),
    plain("infinite_value_window", odd_at="value", odd_number=-math.inf, window_left=2, window_right=1, dtype="bf16"),
    ex("infinite_value_causal", odd_at="value", odd_number=math.inf, causal=1, sinks=2),
    ex("nan_value_behind_bias", odd_at="value", bias_shape=(2, 2, 37, 53), bias_kind="holes"),
    ex("nan_value_padded", odd_at="value", bias_shape=(2, 1, 1, 53), bias_kind="hidden_key", dtype="fp16"),
    ex("infinite_value_padded", odd_at="value", odd_number=math.inf, bias_shape=(1, 1, 1, 53), bias_kind="hidden_key"),
    ex(
        "nan_value_padded_decode",
        odd_at="value",
        bias_shape=(2, 1, 1, 257),
        bias_kind="hidden_key",
        seqlen_q=1,
        seqlen_kv=257,
        v_head_dim=41,
        kv_lengths=(200, 7),
        nan_past_length=True,
    ),
    ex(
        "nan_value_padded_decode_v_narrow",
        odd_at="value",
        bias_shape=(2, 1, 1, 53),
        bias_kind="hidden_key",
        heads_q=8,
        heads_kv=8,
        seqlen_q=1,
        v_head_dim=3,
    ),
    ex(
        "infinite_value_behind_an_infinite_score_decode",
        odd_at="key_and_value",
        odd_number=math.inf,
        bias_shape=(2, 4, 1, 53),
        heads_q=4,
        heads_kv=1,
        seqlen_q=1,
    ),
    ex("nan_key_padded", odd_at="key", bias_shape=(2, 1, 1, 53), bias_kind="hidden_key"),
    ex("infinite_key_padded", odd_at="key", odd_number=math.inf, bias_shape=(2, 1, 1, 53), bias_kind="hidden_key"),
    plain("infinite_key_window", odd_at="key", odd_number=math.inf, window_left=1, dtype="fp16"),
]

WINDOW_ROWS = [
    plain("window_left", window_left=9, dtype="fp16", seqlen_q=150, seqlen_kv=150, batch=1),
    plain("window_left_causal", window_left=9, causal=1, dtype="fp16", seqlen_q=150, seqlen_kv=150, batch=1),
    plain("window_right", window_right=4, dtype="bf16"),
    plain("window_both", window_left=13, window_right=5, seqlen_q=90, seqlen_kv=83, heads_q=1, heads_kv=1),
    plain("window_both_bottom_right", window_left=13, window_right=5, diagonal=1, dtype="fp16", seqlen_q=90),
    plain("window_zero_is_the_diagonal", window_left=0, window_right=0, dtype="fp16"),
    plain("window_left_zero_causal_bottom_right", window_left=0, causal=1, diagonal=1, dtype="fp16"),
    plain("window_hides_late_rows", window_left=2, dtype="fp16", seqlen_q=80, seqlen_kv=11),
    plain("window_of_int32_max", window_left=2**31 - 1, window_right=2**31 - 1, dtype="fp16", layout=1),
    plain("window_right_cannot_undo_causal", window_right=7, causal=1, dtype="fp32"),
]

BIAS_ROWS = [
    ex("bias_full", bias_shape=(2, 2, 37, 53), dtype="fp16"),
    ex("bias_full_fp32_beside_fp16", bias_shape=(2, 2, 37, 53), bias_fp32=True, dtype="fp16", layout=1),
    ex("bias_full_fp32", bias_shape=(2, 2, 37, 53)),
    ex("bias_shared_by_batch", bias_shape=(1, 2, 37, 53), dtype="bf16", causal=1),
    ex("bias_shared_by_heads", bias_shape=(2, 1, 37, 53), bias_kind="holes", dtype="fp16"),
    ex("bias_of_keys", bias_shape=(2, 1, 1, 53), bias_kind="holes", dtype="fp16", causal=1, diagonal=1),
    ex("bias_of_queries", bias_shape=(1, 1, 37, 1), dtype="fp16"),
    ex("bias_of_heads", bias_shape=(1, 6, 1, 1), heads_q=6, heads_kv=3, dtype="bf16", bias_fp32=True),
    ex("bias_one_number", bias_shape=(1, 1, 1, 1), dtype="fp32"),
    ex("bias_holes_fp32", bias_shape=(1, 1, 37, 53), bias_kind="holes", layout=1),
    ex("bias_hides_rows", bias_shape=(1, 1, 37, 53), bias_kind="hidden_rows", dtype="fp16"),
    ex("bias_hides_rows_fp32", bias_shape=(2, 2, 37, 53), bias_kind="hidden_rows"),
    ex("bias_finfo_min_row_fp32", bias_shape=(2, 1, 37, 53), bias_kind="finfo_min_row"),
    ex("bias_finfo_min_row_bf16", bias_shape=(2, 1, 37, 53), bias_kind="finfo_min_row", dtype="bf16"),
    ex(
        "bias_finfo_min_row_beside_fp16",
        bias_shape=(1, 1, 37, 53),
        bias_kind="finfo_min_row",
        bias_fp32=True,
        dtype="fp16",
    ),
    ex("bias_after_softcap", bias_shape=(1, 2, 37, 53), softcap=2.0, dtype="fp16"),
    ex("bias_without_keys", bias_shape=(2, 1, 37, 0), seqlen_kv=0, dtype="fp16"),
]

LENGTH_ROWS = [
    ex("lengths", kv_lengths=(17, 53), dtype="fp16"),
    ex("lengths_shared", kv_lengths=(30,), dtype="bf16", layout=1),
    ex("lengths_out_of_range", kv_lengths=(-5, 1000), dtype="fp16"),
    ex("lengths_out_of_range_bottom_right", kv_lengths=(-5, 1000), causal=1, diagonal=1, dtype="fp16"),
    ex("lengths_of_int32_limits", kv_lengths=(-(2**31), 2**31 - 1), diagonal=1, window_left=3, window_right=3),
    ex("lengths_top_left", kv_lengths=(11, 45), causal=1, dtype="fp16"),
    ex("lengths_bottom_right", kv_lengths=(11, 45), causal=1, diagonal=1, dtype="fp16"),
    ex("lengths_bottom_right_fp32", kv_lengths=(0, 50), causal=1, diagonal=1, heads_q=4),
    ex("lengths_window_bottom_right", kv_lengths=(40, 53), diagonal=1, window_left=6, window_right=2, dtype="bf16"),
    ex("nan_past_length", kv_lengths=(17, 40), nan_past_length=True, dtype="fp16"),
    ex("nan_past_length_fp32", kv_lengths=(0, 40), nan_past_length=True, heads_q=4, layout=1),
    ex("nan_past_length_decode", kv_lengths=(200, 7), nan_past_length=True, seqlen_q=1, seqlen_kv=257, dtype="fp16"),
    ex("lengths_and_bias", kv_lengths=(20, 53), bias_shape=(2, 1, 1, 53), bias_kind="holes", dtype="fp16"),
]

SINK_ROWS = [
    ex("sinks", sinks=2, dtype="fp16"),
    ex("sink_shared", sinks=1, dtype="bf16", causal=1, heads_q=4),
    ex("sinks_fp32", sinks=2, heads_q=6, layout=1),
    ex("sinks_far_above_the_scores", sinks=2, sink_mean=150.0, dtype="fp16"),
    ex("sinks_far_below_the_scores_fp32", sinks=2, sink_mean=-150.0),
    ex("sinks_of_keyless_rows", sinks=2, causal=1, diagonal=1, seqlen_q=71, seqlen_kv=19, dtype="fp16"),
    ex("sinks_without_keys", sinks=2, seqlen_kv=0, dtype="fp16"),
    ex(
        "everything_at_once",
        dtype="fp16",
        heads_q=6,
        softcap=4.0,
        causal=1,
        diagonal=1,
        window_left=21,
        bias_shape=(1, 6, 37, 53),
        bias_kind="holes",
        kv_lengths=(29, 53),
        sinks=2,
        v_head_dim=24,
        layout=1,
    ),
]

LSE_ROWS = [
    ex("lse_alone", dtype="fp16", causal=1),
    ex("lse_of_keyless_rows", dtype="fp16", causal=1, diagonal=1, seqlen_q=71, seqlen_kv=19),
    ex("lse_of_many_rows", seqlen_q=150, causal=1, heads_q=4, layout=1),
    ex("lse_of_huge_scores", score_std=300.0, head_dim=64, heads_q=1, heads_kv=1),
    ex("lse_without_keys", seqlen_kv=0),
    ex("lse_without_queries", seqlen_q=0),
    ex("lse_without_batch", batch=0, sinks=1),
    ex("unread_inputs_hold_nan", nan_where_unread=True, dtype="fp16"),
    ex("unread_inputs_hold_nan_fp32", nan_where_unread=True, causal=1),
]

PACKED_ROWS = [
    packed("packed", seqlen=67, dtype="fp16"),
    packed("packed_causal", seqlen=67, dtype="bf16", causal=1, heads_q=3, heads_kv=3),
    packed("packed_gqa", seqlen=45, dtype="fp16", heads_q=6, heads_kv=2, causal=1, diagonal=1),
    packed("packed_fp32_window", seqlen=51, window_left=5, window_right=3, heads_q=4),
    packed("packed_softcap", seqlen=33, softcap=3.0, dtype="fp16", head_dim=64),
    packed("packed_empty", seqlen=0, dtype="fp16"),
]

CASES: list[Case] = [
    *DTYPE_ROWS,
    *HEAD_DIM_ROWS,
    *SIZE_ROWS,
    *HEAD_ROWS,
    *SCORE_ROWS,
    *ODD_VALUE_ROWS,
    *WINDOW_ROWS,
    *BIAS_ROWS,
    *LENGTH_ROWS,
    *SINK_ROWS,
    *LSE_ROWS,
    *PACKED_ROWS,
]
