# SPDX-License-Identifier: Apache-2.0
"""What a module's forward is made to be while PyTorch runs or captures it, and is not afterwards."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import transformer


@contextlib.contextmanager
def named_parameters(module: torch.nn.Module, names: list[str]) -> Iterator[None]:
    """Inside, forward names what its ``**kwargs`` catches: torch.export gives no dynamic dimension to anything else."""
    forward = module.forward
    parameters = inspect.signature(forward).parameters.values()
    taken = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    if len(taken) == len(parameters) or taken.issuperset(names):
        yield
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(**dict(zip(names, args, strict=False)), **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    own = "forward" in vars(module)
    module.forward = named  # of this instance alone
    try:
        yield
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Without nn.MultiheadAttention's fused fast path, which has no ONNX form and other rounding.

    nn.Transformer looks into a mask to see whether it is causal, which a graph cannot follow. The answer only picks a
    kernel, so here it is no; whether the mask is causal is proven in the graph, at every length.
    """
    previous = torch.backends.mha.get_fastpath_enabled()
    look = transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(previous)
        transformer._detect_is_causal_mask = look
