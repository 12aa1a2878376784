# SPDX-License-Identifier: Apache-2.0
"""The programs of ``programs.py`` in PyTorch, the mistakes made of them, and their inputs.

Lengths come from the inputs, so that every program can be exported with dynamic dims.
"""

from __future__ import annotations

import dataclasses

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


def masked_row_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA, of a boolean or a float mask: a row that sees no key is 0."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def masked_row_mean(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same with a finite number in the place of minus infinity: such a row is the mean of V."""
    added = fill(mask, lowest(q), q) if mask.dtype == torch.bool else mask.clamp(min=lowest(q))
    return attention(q, k, v, bias=added)


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


def hiding_bias(s: Sizes) -> Tensor:
    """``key_mask`` as random numbers, minus infinity where it hides."""
    mask = key_mask(s)
    return random(*mask.shape, seed=5).masked_fill(~mask, -INF)


def left_padding(s: Sizes) -> Tensor:
    """int64 ``[B, S]``, the last batch padded by half on the left."""
    pad = torch.ones(s.batch, s.seqlen_q, dtype=torch.long)
    pad[-1, : s.seqlen_q // 2] = 0
    return pad


def bias_and_mask(s: Sizes) -> tuple[Tensor, ...]:
    mask = torch.ones(s.batch, 1, 1, s.seqlen_kv, dtype=torch.bool)
    mask[-1, ..., s.seqlen_kv - 3 :] = False
    return (*qkv(s), random(1, HEADS, s.seqlen_q, s.seqlen_kv, seed=4), mask)
