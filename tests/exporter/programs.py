# SPDX-License-Identifier: Apache-2.0
"""Attention programs with a known right answer, one per way attention appears or is mistaken for.

Each has its program in PyTorch, the mistake that a careless rewriter makes of it, and the outcome that the exporter
must give. Lengths come from the inputs, so that every program can be exported with dynamic dims; ``Sizes`` are odd
on purpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

INF = float("inf")
HEADS, HEAD_DIM = 4, 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Lengths of the dynamic dims: batch, query length, key length."""

    batch: int = 2
    seqlen_q: int = 6
    seqlen_kv: int = 9


Forward = Callable[..., Tensor | tuple[Tensor, ...]]
Inputs = Callable[[Sizes], tuple[Tensor, ...]]


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
    """

    name: str
    forward: Forward
    inputs: Inputs
    axes: tuple[dict[int, str], ...]
    mistake: Forward | None = None
    refused: str | None = None
    attributes: dict[str, float] = dataclasses.field(default_factory=dict)
    biased: bool = False
    sizes: Sizes = Sizes()
    others: tuple[Sizes, ...] = (Sizes(3, 5, 11), Sizes(1, 1, 7), Sizes(2, 13, 4))


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """Eager attention: scale after the product, the bias added."""
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.softmax(scores if bias is None else scores + bias, -1) @ v


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal fp32 numbers; the seed is part of the test."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MIXING = random(HEADS, HEADS, seed=9)
"""Weights that mix heads; made once, as an exporter would write the random generator into the graph."""


def qkv(s: Sizes, *, kv_heads: int = HEADS, heads: int = HEADS, v_dim: int = HEAD_DIM) -> tuple[Tensor, ...]:
    """``[B, H, Sq, D]``, ``[B, Hkv, Skv, D]``, ``[B, Hkv, Skv, Dv]``."""
    return (
        random(s.batch, heads, s.seqlen_q, HEAD_DIM, seed=1),
        random(s.batch, kv_heads, s.seqlen_kv, HEAD_DIM, seed=2),
        random(s.batch, kv_heads, s.seqlen_kv, v_dim, seed=3),
    )


def square(s: Sizes) -> tuple[Tensor, ...]:
    """Q, K and V of one length."""
    return qkv(dataclasses.replace(s, seqlen_kv=s.seqlen_q))


QKV_AXES: tuple[dict[int, str], ...] = (
    {0: "batch", 2: "seqlen_q"},
    {0: "batch", 2: "seqlen_kv"},
    {0: "batch", 2: "seqlen_kv"},
)
SQUARE_AXES: tuple[dict[int, str], ...] = ({0: "batch", 2: "seqlen"},) * 3


def lowest(q: Tensor) -> float:
    """The lowest finite number of the tensor's type."""
    return torch.finfo(q.dtype).min


def fill(keep: Tensor, number: float, like: Tensor) -> Tensor:
    """0 where ``keep``, else ``number``."""
    return torch.where(keep, torch.zeros((), dtype=like.dtype), torch.full((), number, dtype=like.dtype))


def diagonal_mask(rows: int, columns: int, offset: int) -> Tensor:
    """Keys up to the diagonal that ``offset`` shifts to the right."""
    return torch.ones(rows, columns, dtype=torch.bool).tril(offset)


# Scale


def scale_custom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.1)


def scale_default(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def scale_none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, scale=1.0)


def per_head_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 5.0, 10.0, 20.0], dtype=q.dtype)[:, None, None]
    cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
    return torch.softmax(cosine * scale, -1) @ v


# Causal and other masks


def causal_topleft(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_bottomright(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = q.shape[2], k.shape[2]
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    return torch.softmax((q @ k.transpose(-1, -2) * 0.25).masked_fill(~mask, -INF), -1) @ v


def decode_q1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = q.shape[2], k.shape[2]
    mask = torch.arange(rows)[:, None] + (columns - rows) >= torch.arange(columns)[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def leftpad_mask(q: Tensor, pad: Tensor) -> Tensor:
    position = torch.arange(q.shape[2])
    return (position[None] <= position[:, None])[None, None] & pad.bool()[:, None, None, :]


def leftpad_plus_causal(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
    return attention(q, k, v, bias=fill(leftpad_mask(q, pad), lowest(q), q))


def leftpad_as_length(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
    position, lengths = torch.arange(q.shape[2]), pad.sum(1)
    keep = (position[None] <= position[:, None])[None, None] & (position[None] < lengths[:, None])[:, None, None, :]
    return attention(q, k, v, bias=fill(keep, lowest(q), q))


def leftpad_hidden(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
    keep = leftpad_mask(q, pad)
    scores = (q @ k.transpose(-1, -2)) * 0.25 + fill(keep, -INF, q)
    probs = torch.softmax(scores, -1)
    return torch.where(torch.isnan(probs), torch.zeros((), dtype=q.dtype), probs) @ v


def masked_row_finfo_min(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attention(q * 1e-2, k, v, bias=fill(mask, lowest(q), q))


def masked_row_as_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q * 1e-2, k, v, attn_mask=mask)


def where_outside(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.25
    return torch.softmax(torch.where(mask, scores, torch.full((), -1e4, dtype=q.dtype)), -1) @ v


def where_inside(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attention(q, k, v, bias=fill(mask, -1e4, q))


def window_exact(q: Tensor, k: Tensor, v: Tensor, width: int = 3) -> Tensor:
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position[None]
    return attention(q, k, v, bias=fill((distance >= 0) & (distance < width), -INF, q))


def const_true_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# Biases


def bias_per_head_plus_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25 + bias + fill(mask, -1e9, q), -1) @ v


def alibi_bias(q: Tensor) -> Tensor:
    position = torch.arange(q.shape[2])
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=q.dtype)[:, None, None]
    return slopes * (position[None] - position[:, None])


def alibi_absolute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, bias=-alibi_bias(q).abs())


def alibi_signed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, bias=alibi_bias(q))


def softcapped(scores: Tensor) -> Tensor:
    return 5 * torch.tanh(scores / 5)


def softcap_before_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = fill(diagonal_mask(q.shape[2], k.shape[2], 0), -INF, q)
    return torch.softmax(softcapped(q @ k.transpose(-1, -2) * 0.25) + mask, -1) @ v


def softcap_after_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = fill(diagonal_mask(q.shape[2], k.shape[2], 0), -INF, q)
    return torch.softmax(softcapped(q @ k.transpose(-1, -2) * 0.25 + mask), -1) @ v


# Operands


def gqa_interleave(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def repeat(x: Tensor) -> Tensor:
        batch, heads, length, depth = x.shape
        return x[:, :, None].expand(batch, heads, 2, length, depth).reshape(batch, 2 * heads, length, depth)

    return attention(q, repeat(k), repeat(v))


def gqa_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def v_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probs = ((q.transpose(-2, -1) @ k) * 0.25).softmax(-1)
    return v @ probs.transpose(-2, -1)


def v_not_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probs = ((q.transpose(-2, -1) @ k) * 0.25).softmax(-1)
    return v @ probs


def einsum_form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probs = (torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", probs, v)


# Look-alikes


def probs_are_output(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    probs = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
    return probs @ v, probs.mean(1)


def talking_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqk,hg->bgqk", q @ k.transpose(-1, -2) * 0.25, MIXING.to(q.dtype))
    return torch.softmax(scores, -1) @ v


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -2) @ v


def sink_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinks = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=q.dtype).view(1, HEADS, 1, 1)
    scores = q @ k.transpose(-1, -2) * 0.25
    column = sinks.expand(q.shape[0], HEADS, q.shape[2], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v


def plain(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Attention that forgets everything but the default scale."""
    return attention(q, k, v)


def key_mask(s: Sizes) -> Tensor:
    """``[B, 1, Sq, Skv]`` in which the first row of the first batch sees no key."""
    mask = torch.ones(s.batch, 1, s.seqlen_q, s.seqlen_kv, dtype=torch.bool)
    mask[0, 0, 0] = False
    return mask


def left_padding(s: Sizes) -> Tensor:
    """int64 ``[B, S]``, the last batch padded by half on the left."""
    pad = torch.ones(s.batch, s.seqlen_q, dtype=torch.long)
    pad[-1, : s.seqlen_q // 2] = 0
    return pad


def bias_and_mask(s: Sizes) -> tuple[Tensor, ...]:
    mask = torch.ones(s.batch, 1, 1, s.seqlen_kv, dtype=torch.bool)
    mask[-1, ..., s.seqlen_kv - 3 :] = False
    return (*qkv(s), random(1, HEADS, s.seqlen_q, s.seqlen_kv, seed=4), mask)


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
