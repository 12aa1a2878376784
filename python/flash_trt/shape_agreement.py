# SPDX-License-Identifier: Apache-2.0
"""Whether the tensors given for a model's inputs have the model's shapes, and agree on the lengths that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flash_export import dim_ranges
from flash_export.errors import UsageError
from flash_trt import lengths
from flash_trt.lengths import Length
from flash_trt.onnx_file import GraphInput
from flash_trt.shapes import Dims


def require_taken(
    where: str, graph_input: GraphInput, shape: Dims, limits: Mapping[str, tuple[int, int]] | None = None
) -> None:
    """Refuses a tensor for ``graph_input`` whose ``shape`` is not the model's, or leaves ``limits``.

    Raises:
        UsageError: names ``where``, the shape and the range.
    """
    dims, got, need = graph_input.dims, f"[{', '.join(map(str, shape))}]", lengths.spell_dims(graph_input)
    if len(dims) != len(shape) or any(
        isinstance(dim, int) and dim != size for dim, size in zip(dims, shape, strict=True)
    ):
        raise UsageError(
            "an input has another shape than the model takes",
            where=where,
            got=got,
            need=need,
            do="give a tensor of that shape",
        )
    for length, size in zip(lengths.of(graph_input), shape, strict=True):
        if length is None or len(length.names) > 1:
            continue
        (name,) = length.names
        span = (size, size) if length.is_name else length.solutions(name, size, {})
        if span is None:
            raise UsageError(
                "an input has another shape than the model takes",
                where=f"{where}, dim {length.text}",
                got=got,
                need=f"a whole number for {name} in {length.text}: {need}",
                do=f"give a tensor with a size that {length.text} can be",
            )
        known = (limits or {}).get(name)
        if known and not lengths.narrowed(span, known):
            raise UsageError(
                "an input leaves the range in which the model works",
                where=f"{where}, dim {length.text}",
                got=got,
                need=f"{name} in {dim_ranges.spell(known)}: {need}",
                do=f"give a tensor whose {name} is in that range, or export the model again for another one",
            )


def require_alike(where: str, inputs: Sequence[GraphInput], taken: Mapping[str, Dims]) -> None:
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
    left: list[Length] = []
    for graph_input in inputs:
        for length, size in zip(lengths.of(graph_input), taken[graph_input.name], strict=True):
            if length is None:
                continue
            if seen.setdefault(length.text, (size, graph_input.name))[0] != size:
                dim, (first, name) = length.text, seen[length.text]
                raise _unlike(where, inputs, length, f"{dim} is {first} in {name} and {size} in {graph_input.name}")
            if not length.is_name and length not in left:
                left.append(length)
    while left:
        # One whose names are known is checked before another tells a name, and one that tells it exactly comes first.
        left.sort(key=lambda length: sum(name not in seen for name in length.names))
        length = left.pop(0)
        unknown = [name for name in length.names if name not in seen]
        size, name = seen[length.text]
        sizes = {part: seen[part][0] for part in length.names if part in seen}
        if len(unknown) == 1 and (span := length.solutions(unknown[0], size, sizes)):
            if span[0] == span[1]:
                seen[unknown[0]] = span[0], name
        elif not unknown and (wanted := length.at(sizes)) != size:
            parts = " and ".join(f"{part} is {seen[part][0]} in {seen[part][1]}" for part in length.names)
            raise _unlike(where, inputs, length, f"{length.text} is {size} in {name}, not {wanted}, as {parts}")


def _unlike(where: str, inputs: Sequence[GraphInput], length: Length, got: str) -> UsageError:
    names = set(length.names)
    holding = [i for i in inputs if any(other and names & set(other.names) for other in lengths.of(i))]
    return UsageError(
        "two inputs disagree on a length that is one and the same in the model",
        where=f"{where}, dim {length.text}",
        got=got,
        need=", ".join(f"{i.name} {lengths.spell_dims(i)}" for i in holding),
        do=f"give tensors that agree on {length.text}",
    )
