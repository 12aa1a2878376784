# SPDX-License-Identifier: Apache-2.0
"""The tensors of a state dict go into the module they belong to: by name, all of them, with a common prefix or without.

Nothing is guessed: names fit as a whole or the user hears which do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flash_export.errors import UsageError

WRAPPERS = ("_orig_mod.", "module.")
"""What torch.compile and DataParallel put before every name."""


def fill(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], path: Path, again: Callable[[], torch.nn.Module]
) -> tuple[str, ...]:
    """Puts ``weights`` into ``module`` and returns notes on what the user should know of that.

    A prefix that every name has is taken off where the rest are the module's names. A buffer that the file lacks keeps
    the module's value where that is a constant: see ``_is_constant``. A parameter never does.

    Args:
        path: of the weights, for messages.
        again: builds the module once more.

    Raises:
        UsageError: the names or shapes are not the module's.
    """
    own = module.state_dict()
    stripped = strip_wrappers(weights)
    if stripped.keys() != own.keys() and any(name.startswith(p) for name in own for p in WRAPPERS):
        module = unwrapped(module)
        own = module.state_dict()
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for names in _without_prefixes(stripped):
        if names.keys() <= own.keys() and own.keys() - names.keys() <= buffers:
            stripped = names
            break
    missing, unexpected = sorted(own.keys() - stripped.keys()), sorted(stripped.keys() - own.keys())
    if missing and not unexpected and buffers.issuperset(missing) and stripped:
        missing = _unknown_buffers(missing, module, again)
    if missing or unexpected:
        raise _other_names(missing, unexpected, stripped, module, path)
    for name, tensor in stripped.items():
        if own[name].shape != tensor.shape:
            raise UsageError(
                "a weight has another shape than the model's",
                where=f"{name} in {path}",
                got=str(list(tensor.shape)),
                need=str(list(own[name].shape)),
                do="check that --model builds the model these weights were saved from, with the same settings",
            )
    kept = sorted(own.keys() - stripped.keys())
    module.load_state_dict(stripped, strict=not kept)
    return (f"{path.name} lacks the buffers {some(kept)}: they hold what the model gives them itself",) if kept else ()


def strip_wrappers(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights without the prefixes of torch.compile and DataParallel, where every name has them."""
    stripped = dict(weights)
    while stripped:
        prefix = next((p for p in WRAPPERS if all(name.startswith(p) for name in stripped)), None)
        if prefix is None:
            break
        stripped = {name[len(prefix) :]: tensor for name, tensor in stripped.items()}
    return stripped


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside those of torch.compile and DataParallel."""
    inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else module


def some(names: Any, count: int = 3) -> str:
    """The first names, for a message."""
    shown = [str(name) for name in list(names)[:count]]
    return (", ".join(shown) + (", ..." if len(names) > count else "")) or "none"


def _common_prefix(names: Collection[str]) -> str:
    """The whole parts, each with its dot, that every name begins with."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(f"{parts[0]}.")
    return "".join(common)


def _without_prefixes(weights: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The weights as they are, then without the first part of a prefix that all names have, the first two, ..."""
    prefix = _common_prefix(weights)
    for end in [0, *(i + 1 for i, letter in enumerate(prefix) if letter == ".")]:
        yield {name[end:]: tensor for name, tensor in weights.items()}


def _unknown_buffers(names: list[str], module: torch.nn.Module, again: Callable[[], torch.nn.Module]) -> list[str]:
    """Those of the buffers that the module may not fill in itself."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(int(torch.initial_seed()) % 2**31 + 1)
        other = unwrapped(again())
    finally:
        torch.random.set_rng_state(state)
    own, second = module.state_dict(), other.state_dict()
    # A callable that hands out one module gives no second look at its values.
    return [n for n in names if other is module or n not in second or not _is_constant(own[n], second[n])]


def _is_constant(tensor: torch.Tensor, again: torch.Tensor) -> bool:
    """Whether a buffer holds what its model computes, such as a mask or a table of positions, and nothing learned.

    What training fills in starts as one number everywhere (running means, counts) or at random (codebooks).
    """
    if tensor.numel() < 2 or tensor.shape != again.shape or tensor.dtype != again.dtype:
        return False
    same = bool(((tensor == again) | (tensor != tensor) & (again != again)).all())
    return same and not bool((tensor == tensor.reshape(-1)[0]).all())


def _other_names(
    missing: list[str], unexpected: list[str], weights: Mapping[str, torch.Tensor], module: torch.nn.Module, path: Path
) -> UsageError:
    prefix = _common_prefix(weights)
    return UsageError(
        "the weights are not this model's",
        where=str(path),
        got=f"{len(missing)} missing ({some(missing)}) and {len(unexpected)} unexpected ({some(unexpected)})"
        + (f"; every name has the prefix {prefix}" if prefix else ""),
        need=f"the {len(module.state_dict())} tensors of {type(module).__name__}, by name",
        do="check that --model builds the model these weights were saved from, with the same settings",
    )
