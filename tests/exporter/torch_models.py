# SPDX-License-Identifier: Apache-2.0
"""Small PyTorch modules that the tests of load and export save, load and export. Sizes are odd on purpose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

MODEL_SOURCE = '''\
import torch
from torch.nn import functional


class Block(torch.nn.Module):
    """Self-attention over [batch, seq, 24] with 3 heads."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(24, 72)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def build():
    return Block()


def needs_size(size):
    return Block()


def not_a_module():
    return 3
'''
"""A user's own file, for ``--model``."""


class Block(torch.nn.Module):
    """The same as in ``MODEL_SOURCE``, with a mask if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(24, 72)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Attention(torch.nn.Module):
    """One call of scaled_dot_product_attention with fixed keyword arguments."""

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.arguments)  # type: ignore[arg-type]


def save_program(path: Path, *, seed: int = 0) -> torch.export.ExportedProgram:
    """``Block`` as an ExportedProgram with dynamic batch and a sequence of 1 to 64."""
    torch.manual_seed(seed)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", min=1, max=64)}
    program = torch.export.export(Block(), (torch.randn(2, 7, 24),), dynamic_shapes=(dims,))
    torch.export.save(program, path)
    return program


def standard_normal(*shape: int, seed: int = 0) -> np.ndarray:
    """float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
