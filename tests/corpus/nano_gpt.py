# SPDX-License-Identifier: Apache-2.0
"""A small GPT as textbooks write it: split heads, Q.K^T / sqrt(d), a tril mask, softmax, P.V, merge heads."""

from __future__ import annotations

import math

import torch
from torch import nn


class CausalSelfAttention(nn.Module):
    """[B, S, width] -> [B, S, width]; the mask is a buffer of the longest length, cut to the one at hand."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("tril", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.size()
        query, key, value = self.qkv(x).split(width, dim=2)
        query = query.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
        key = key.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
        value = value.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
        scores = (query @ key.transpose(-2, -1)) / math.sqrt(key.size(-1))
        scores = scores.masked_fill(self.tril[:, :, :seq, :seq] == 0, float("-inf"))
        probs = self.dropout(torch.softmax(scores, dim=-1))
        merged = (probs @ value).transpose(1, 2).contiguous().view(batch, seq, width)
        return self.projection(merged)


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, longest)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Token ids [B, S] -> {"last_hidden_state": logits [B, S, vocabulary]}."""

    def __init__(self, vocabulary: int, longest: int, width: int = 21, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, longest) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return {"last_hidden_state": self.head(self.ln_f(x))}
