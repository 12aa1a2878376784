# SPDX-License-Identifier: Apache-2.0
"""Attention programs with a known right answer, one per way attention appears or is mistaken for.

Each has its program in PyTorch, the mistake that a careless rewriter makes of it, and the outcome that the exporter
must give. The programs themselves are in ``program_forms.py``; ``Sizes`` are odd on purpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from exporter.program_forms import (
    HEAD_DIM,
    INF,
    Sizes,
    alibi_absolute,
    alibi_signed,
    attention,
    bias_and_mask,
    bias_per_head_plus_mask,
    causal_bottomright,
    causal_topleft,
    const_true_mask,
    decode_q1,
    diagonal_mask,
    einsum_form,
    fill,
    gqa_interleave,
    gqa_tiled,
    hiding_bias,
    key_mask,
    left_padding,
    leftpad_as_length,
    leftpad_hidden,
    leftpad_plus_causal,
    masked_row_as_zero,
    masked_row_finfo_min,
    masked_row_mean,
    masked_row_zero,
    per_head_scale,
    plain,
    probs_are_output,
    qkv,
    scale_custom,
    scale_default,
    scale_none,
    sink_column,
    softcap_after_mask,
    softcap_before_mask,
    softmax_over_queries,
    square,
    talking_heads,
    v_not_transposed,
    v_transposed,
    where_inside,
    where_outside,
    window_exact,
)
from torch import Tensor
from torch.nn import functional as F

Forward = Callable[..., Tensor | tuple[Tensor, ...]]
Inputs = Callable[[Sizes], tuple[Tensor, ...]]


USUAL = Sizes()


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Args:
        name: what the tests call it.
        forward: the program; its result in float64 is the right answer.
        inputs: makes its inputs.
        axes: for every input, its dynamic axes and their names.
        mistake: what a common fault computes; must be told apart from the right answer.
        refused: the code with which the site is refused; None: it is fused.
        attributes: attributes that the node must have.
        biased: whether a mask or bias stays a tensor; "static": only with fixed lengths, and so on.
        sizes: the lengths to export with.
        others: other lengths at which the dynamic export must be right.
        exported_as: exporters whose graph itself computes something else than PyTorch does, and what: the rewrite
            keeps to the graph.
    """

    name: str
    forward: Forward
    inputs: Inputs
    axes: tuple[dict[int, str], ...]
    mistake: Forward | None = None
    refused: str | None = None
    attributes: dict[str, float] = dataclasses.field(default_factory=dict)
    biased: bool = False
    sizes: Sizes = USUAL
    others: tuple[Sizes, ...] = (Sizes(3, 5, 11), Sizes(1, 1, 7), Sizes(2, 13, 4))
    exported_as: dict[str, Forward] = dataclasses.field(default_factory=dict)


QKV_AXES: tuple[dict[int, str], ...] = (
    {0: "batch", 2: "seqlen_q"},
    {0: "batch", 2: "seqlen_kv"},
    {0: "batch", 2: "seqlen_kv"},
)
SQUARE_AXES: tuple[dict[int, str], ...] = ({0: "batch", 2: "seqlen"},) * 3


MASK_AXES = (*QKV_AXES, {0: "batch", 2: "seqlen_q", 3: "seqlen_kv"})
SQUARE = (Sizes(3, 5, 5), Sizes(1, 1, 1), Sizes(2, 67, 67))
STACKED = (*SQUARE_AXES, {0: "batch", 1: "seqlen"})

PROGRAMS = {
    p.name: p
    for p in (
        Program("scale_custom", scale_custom, qkv, QKV_AXES, plain, attributes={"scale": 0.1}),
        Program(
            "scale_half_read",
            scale_default,
            qkv,
            QKV_AXES,
            lambda q, k, v: attention(q, k, v, scale=16**-0.25),
            attributes={"scale": 0.25},
        ),
        Program("scale_none_t5", scale_none, qkv, QKV_AXES, plain, attributes={"scale": 1.0}),
        Program(
            "causal_topleft",
            causal_topleft,
            qkv,
            QKV_AXES,
            lambda q, k, v: attention(q, k, v, bias=fill(diagonal_mask(6, 9, 3), -INF, q)),
            attributes={"causal": 1, "diagonal": 0},
        ),
        Program(
            "causal_bottomright",
            causal_bottomright,
            qkv,
            QKV_AXES,
            lambda q, k, v: attention(q, k, v, bias=fill(diagonal_mask(6, 9, 0), -INF, q)),
            attributes={"causal": 1, "diagonal": 1},
            # More queries than keys: rows without a key are NaN in the unguarded program.
            others=(Sizes(3, 5, 11), Sizes(1, 1, 7), Sizes(2, 4, 4)),
        ),
        Program(
            "decode_q1",
            decode_q1,
            lambda s: qkv(dataclasses.replace(s, seqlen_q=1)),
            ({0: "batch"}, *QKV_AXES[1:]),
            lambda q, k, v: v[:, :, :1],
            attributes={"causal": 0},
        ),
        # Filled with finfo.min, the mask stays one bias: a row that sees no key, as the first rows of a batch padded on
        # the left, gives the mean of *all* V, those behind the diagonal too, and no causal node does. Filled with -inf
        # (``leftpad_hidden``), such a row counts for nothing: causal is proven, the padding alone is data.
        Program(
            "leftpad_plus_causal",
            leftpad_plus_causal,
            lambda s: (*square(s), left_padding(s)),
            STACKED,
            leftpad_as_length,
            biased=True,
            others=SQUARE,
        ),
        Program(
            "leftpad_hidden",
            leftpad_hidden,
            lambda s: (*square(s), left_padding(s)),
            STACKED,
            leftpad_as_length,
            attributes={"causal": 1},
            biased=True,
            others=SQUARE,
        ),
        Program(
            "masked_row_finfo_min",
            masked_row_finfo_min,
            lambda s: (*qkv(s), key_mask(s)),
            MASK_AXES,
            masked_row_as_zero,
            attributes={"scale": 0.0025},
            biased=True,
        ),
        Program(
            "masked_row_sdpa_boolean",
            masked_row_zero,
            lambda s: (*qkv(s), key_mask(s)),
            MASK_AXES,
            masked_row_mean,
            biased=True,
            # PyTorch's translation for opset 18 fills with the type's smallest number; it has no guard.
            exported_as={"dynamo18": masked_row_mean},
        ),
        Program(
            "masked_row_sdpa_float",
            masked_row_zero,
            lambda s: (*qkv(s), hiding_bias(s)),
            MASK_AXES,
            masked_row_mean,
            biased=True,
        ),
        Program(
            "where_outside_loses_scores",
            where_outside,
            lambda s: (*qkv(s), key_mask(s)),
            MASK_AXES,
            where_inside,
            refused="mask_replaces_scores",
        ),
        Program(
            "gqa_interleave",
            gqa_interleave,
            lambda s: qkv(s, kv_heads=2),
            QKV_AXES,
            gqa_tiled,
            attributes={"q_num_heads": 4, "kv_num_heads": 2},
        ),
        Program(
            "softcap_before_mask",
            softcap_before_mask,
            square,
            SQUARE_AXES,
            softcap_after_mask,
            attributes={"softcap": 5.0, "causal": 1},
            others=SQUARE,
        ),
        Program(
            "window_exact",
            window_exact,
            square,
            SQUARE_AXES,
            lambda q, k, v: window_exact(q, k, v, 4),
            attributes={"causal": 1, "window_left": 2},
            others=SQUARE,
        ),
        Program(
            "bias_per_head_plus_mask",
            bias_per_head_plus_mask,
            bias_and_mask,
            (*QKV_AXES, {2: "seqlen_q", 3: "seqlen_kv"}, {0: "batch", 3: "seqlen_kv"}),
            lambda q, k, v, bias, mask: attention(q, k, v, bias=fill(mask, -1e9, q)),
            biased=True,
        ),
        Program("alibi_abs_vs_signed", alibi_absolute, square, SQUARE_AXES, alibi_signed, biased=True, others=SQUARE),
        Program("v_dim_differs", scale_default, lambda s: qkv(s, v_dim=12), QKV_AXES),
        Program(
            "ultralytics_v_pT",
            v_transposed,
            lambda s: tuple(x.transpose(-1, -2).contiguous() for x in square(s)),
            ({0: "batch", 3: "seqlen"},) * 3,
            v_not_transposed,
            others=SQUARE,
        ),
        Program("einsum_form", einsum_form, qkv, QKV_AXES),
        Program("probs_are_output", probs_are_output, qkv, QKV_AXES, refused="probabilities_used"),
        Program("talking_heads_lookalike", talking_heads, qkv, QKV_AXES, plain, refused="heads_mixed"),
        Program("softmax_over_queries_lookalike", softmax_over_queries, qkv, QKV_AXES, plain, refused="softmax_axis"),
        Program("per_head_scale_cosine", per_head_scale, qkv, QKV_AXES, plain),
        Program("sink_column", sink_column, qkv, QKV_AXES, plain, attributes={"has_sinks": 1}),
        Program(
            "partial_tile_noncausal",
            lambda q, k, v: F.scaled_dot_product_attention(2 * q, k, v),
            lambda s: qkv(dataclasses.replace(s, seqlen_kv=s.seqlen_kv + 56)),
            QKV_AXES,
            lambda q, k, v: attention(2 * q, F.pad(k, (0, 0, 0, 63)), F.pad(v, (0, 0, 0, 63))),
            attributes={"scale": 0.5},
        ),
        Program("const_true_mask", const_true_mask, qkv, QKV_AXES),
    )
}

assert math.isclose(HEAD_DIM**-0.5, 0.25), "the programs write the default scale as 0.25"
