# SPDX-License-Identifier: Apache-2.0
"""Small PyTorch modules that the tests of load and export save, load and export. Sizes are odd on purpose."""

from __future__ import annotations

import copy
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


def in_float64(module: torch.nn.Module, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What ``module`` gives in float64 on the same inputs: the reference of both PyTorch's float32 and the graph's."""
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    with torch.no_grad():
        outputs = copy.deepcopy(module).double()(**wide)
    return [leaf.numpy() for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def assert_as_good_as_eager(
    outputs: list[np.ndarray], base: list[np.ndarray], reference: list[np.ndarray], factor: float = 2.0
) -> None:
    """Each output may err ``factor`` times as much as ``base``, eager PyTorch in the same type, plus 2 ulp."""
    assert len(outputs) == len(base) == len(reference)
    for output, plain, exact in zip(outputs, base, reference, strict=True):
        assert (output.dtype, output.shape) == (plain.dtype, plain.shape)
        rounded = exact.astype(plain.dtype)
        offset = plain.dtype.type(0.3)
        ulp = np.abs(((rounded + offset) - offset) - rounded).max(initial=0)
        error, allowed = (np.abs(x - exact).max(initial=0) for x in (output, plain))
        assert error <= factor * allowed + 2 * ulp, f"error {error}, eager's own {allowed}, ulp {ulp}"


def standard_normal(*shape: int, seed: int = 0) -> np.ndarray:
    """float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class BatchFirst(torch.nn.Module):
    """PyTorch's own multi-head attention: in fp16 the graph on which ONNX Runtime 1.32 crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]
