# SPDX-License-Identifier: Apache-2.0
"""What the dynamic dimensions of an exported graph are called, and between which sizes they lie."""

from __future__ import annotations

import re
from typing import Any

import onnx_ir as ir
import torch

from flash_export.errors import UnsupportedModel
from flash_export.inputs import MAX_DIM
from flash_export.load import Loaded
from flash_export.options import Dim

_ASSUMED = 2
"""The smallest size that torch.export assumes of a dimension: it takes 0 and 1 for constants."""


def ranges_of(loaded: Loaded) -> dict[str, tuple[int, int]]:
    """Dynamic dimension -> its range as the user gave it."""
    dims = (dim for a in loaded.arguments for dim in a.dims.values())
    return {dim.name: (dim.low or 1, dim.high or MAX_DIM) for dim in dims}


def dims_of(loaded: Loaded, model: ir.Model, ranges: dict[str, tuple[int, int]]) -> dict[str, tuple[str, int, int]]:
    """Symbol of the graph -> (name, smallest, largest) of every dynamic dimension of its inputs.

    The names are the user's. An ExportedProgram has them while it is in memory; ``torch.export.save`` keeps none, and
    then they are ``INPUT_dimAXIS``; of an axis such as ``4*Dim("blocks")``, ``INPUT_dimAXIS_unit`` in place of
    ``blocks``.

    Raises:
        UnsupportedModel: a dimension that was to be dynamic is a number in the graph.
    """
    found: dict[str, tuple[str, int, int]] = {}
    if loaded.program is None:
        for index, argument in enumerate(loaded.arguments):
            for axis, dim in argument.dims.items():
                symbol = _symbol_of(model.graph.inputs[index], axis, dim.name, loaded)
                if not is_sum(dim):
                    found.setdefault(symbol, (dim.name, *ranges[dim.name]))
        return found
    limits = {str(symbol): bounds for symbol, bounds in loaded.program.range_constraints.items()}
    names = _names_in(loaded.program)
    sizes = [
        (size.value, f"{value.name}_dim{axis}")
        for value in model.graph.inputs
        for axis, size in enumerate(value.shape or ())
        if isinstance(size, ir.SymbolicDim) and size.value
    ]
    # An axis that is a symbol names it before one that is computed from it.
    for size, fallback in sorted(sizes, key=lambda pair: not pair[0].isidentifier()):
        for symbol in re.findall(r"[A-Za-z_]\w*", size):
            name = fallback if symbol == size else f"{fallback}_unit"
            found.setdefault(symbol, (names.get(symbol, name), *_limits(limits.get(symbol))))
    return found


def left_out_at_one(loaded: Loaded, dims: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    """The dimensions of an ExportedProgram that may as well be 1, as ``Captured.left_out`` has them.

    torch.export assumes 2 and more of a dimension without a range of its own, as ``Dim.AUTO`` is, and lets the program
    run with 1. A ``Dim`` that its author began at 2 and never ended looks the same.
    """
    if loaded.program is None:
        return {}
    return {name: [1] for name, limits in dims.items() if limits == (_ASSUMED, MAX_DIM)}


def name_sums(loaded: Loaded, model: ir.Model) -> None:
    """Calls an axis that is declared as a sum, such as ``past + seq``, by it where the graph has a symbol of its own.

    torch.export finds such a sum where forward adds up the two lengths. Where forward only meets both, as by adding a
    mask to scores, it may take the axis for a third length.
    """
    sums: dict[str, str] = {}
    for value, argument in zip(model.graph.inputs, loaded.arguments, strict=False):
        for axis, dim in argument.dims.items():
            size = value.shape[axis] if value.shape is not None else None
            if is_sum(dim) and isinstance(size, ir.SymbolicDim) and size.value and size.value.isidentifier():
                sums[size.value] = dim.name
    if not sums:
        return
    for value in [*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([_with_sums(dim, sums) for dim in value.shape])


def _with_sums(dim: int | ir.SymbolicDim, sums: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    if dim.value in sums:
        return sums[dim.value]
    return re.sub(r"[A-Za-z_]\w*", lambda match: f"({sums[match[0]]})" if match[0] in sums else match[0], dim.value)


def _names_in(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Symbol -> the name of the ``torch.export.Dim`` it was made from, where PyTorch still knows it."""
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    modes = (getattr(value, "fake_mode", None) for value in values)
    shapes = next((mode.shape_env for mode in modes if mode is not None), None)
    symbols, same = getattr(shapes, "source_to_var", {}), getattr(shapes, "replacements", {})
    found: dict[str, str] = {}
    called = getattr(shapes, "source_name_to_debug_name", {})
    for source, symbol in symbols.items():
        # A Dim of which an axis is a multiple is no input's: it is its own source.
        name = called.get(source, source)
        if name.isidentifier():
            found.setdefault(str(same.get(symbol, symbol)), name)
    return {symbol: name for symbol, name in found.items() if list(found.values()).count(name) == 1}


def _limits(bounds: Any) -> tuple[int, int]:
    if bounds is None:
        return 1, MAX_DIM
    low, high = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
    return max(low or 1, 1), min(high or MAX_DIM, MAX_DIM)


def _symbol_of(value: ir.Value, axis: int, name: str, loaded: Loaded) -> str:
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, ir.SymbolicDim) or size.value is None:
        raise UnsupportedModel(
            f"the dimension {name} became a fixed number in the export",
            where=f"input {value.name}, axis {axis}",
            got=str(size),
            need="a dynamic dimension",
            do=f"{as_number(name, loaded.told_in)}, or take len/shape at run time in forward",
        )
    return size.value


def as_number(name: str, told_in: str) -> str:
    """What to do about a dimension that cannot be dynamic, in the words of ``Loaded.told_in``."""
    if told_in == "--input":
        return f"give a number in the place of {name} in --input"
    if told_in == "--kv-cache":
        return "leave --kv-cache out, which asks for this dimension"
    return f"leave {name} out of {told_in}, which fixes it at the example's size"


def is_sum(dim: Dim) -> bool:
    """Whether a dimension is a sum of two, such as ``past + seq``."""
    return not dim.name.isidentifier()
