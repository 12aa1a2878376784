# SPDX-License-Identifier: Apache-2.0
"""Whether the tensors given for a model's inputs agree on the lengths that the model names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flash_export.errors import UsageError
from flash_trt import shapes
from flash_trt.onnx_file import GraphInput


def require_alike(where: str, inputs: Sequence[GraphInput], taken: Mapping[str, shapes.Dims]) -> None:
    """Refuses tensors of which two give one symbol, or an expression of symbols, different lengths.

    ONNX Runtime would broadcast a size of 1, or fail somewhere inside the model.

    Args:
        where: what holds the tensors.
        inputs: the model's inputs.
        taken: input -> shape, each of its model's rank.

    Raises:
        UsageError: names the symbol, with both lengths and both inputs.
    """
    seen: dict[str, tuple[int, str]] = {}
    for graph_input in inputs:
        for dim, size in zip(graph_input.dims, taken[graph_input.name], strict=True):
            if isinstance(dim, str) and dim and seen.setdefault(dim, (size, graph_input.name))[0] != size:
                got = f"{dim} is {seen[dim][0]} in {seen[dim][1]} and {size} in {graph_input.name}"
                raise _unlike(where, inputs, dim, got)
    for dim, (size, name) in seen.items():
        parts = sorted(shapes.as_dim(dim).symbols)
        if not parts or parts == [dim] or not seen.keys() >= set(parts):
            continue
        wanted = shapes.as_dim(dim).evaluate({part: seen[part][0] for part in parts})
        if wanted != size:
            lengths = " and ".join(f"{part} is {seen[part][0]} in {seen[part][1]}" for part in parts)
            raise _unlike(where, inputs, dim, f"{dim} is {size} in {name}, not {wanted}, as {lengths}")


def _unlike(where: str, inputs: Sequence[GraphInput], dim: str, got: str) -> UsageError:
    holding = [i for i in inputs if any(isinstance(d, str) and d in (dim, *shapes.as_dim(dim).symbols) for d in i.dims)]
    return UsageError(
        "two inputs disagree on a length that is one and the same in the model",
        where=f"{where}, dim {dim}",
        got=got,
        need=", ".join(f"{i.name} {shapes.spell_dims(i)}" for i in holding),
        do=f"give tensors that agree on {dim}",
    )
