# SPDX-License-Identifier: Apache-2.0
"""Example inputs and dynamic shapes as a program gives them, for a module that is in memory already."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flash_export.errors import UsageError
from flash_export.inputs import parse_inputs
from flash_export.load import Argument, Loaded, refuse_flags
from flash_export.options import Dim, InputSpec, Options

_HOW = "describe forward's tensors, or give torch.export.export's ExportedProgram, which takes every kind of call"

_FIT = "give another example, or other dynamic_shapes"


def opened(source: object, example_inputs: object, dynamic_shapes: object, options: Options) -> Loaded:
    """The module or program as ``load`` would have returned it.

    Raises:
        UsageError: neither a module nor a program, one in training mode, or inputs that do not fit.
    """
    path = Path(type(source).__name__)
    if isinstance(source, torch.export.ExportedProgram):
        refuse_flags(options, "exported_program")
        if example_inputs is not None or dynamic_shapes is not None:
            raise _wrong("an ExportedProgram brings its own inputs", "example_inputs or dynamic_shapes", "neither")
        return Loaded(path, "exported_program", program=source)
    if not isinstance(source, torch.nn.Module):
        raise _wrong("the source is of no kind known", f"a {type(source).__name__}", "a module, a program or a path")
    if source.training:
        raise UsageError(
            "the module is in training mode",
            where=type(source).__name__,
            got="module.training is True",
            need="a module whose dropout and norms are as in inference",
            do="call module.eval() first",
        )
    if options.dtype is not None or options.model is not None:
        raise _wrong("a module brings its own weights and types", "dtype or model", "neither; module.to(...) casts")
    return Loaded(path, "module", source, arguments=arguments_of(source, example_inputs, dynamic_shapes))


def arguments_of(module: torch.nn.Module, example_inputs: object, dynamic_shapes: object) -> tuple[Argument, ...]:
    """The tensors of one call of forward, by name and in forward's order, with their dynamic axes.

    An axis of size 1 that is to be dynamic is doubled, since torch.export takes 1 for a fixed size.

    Raises:
        UsageError: they do not fit forward, hold more than tensors, or a shape cannot be read.
    """
    tensors = _bind(module, example_inputs)
    specs = specs_of(tensors, dynamic_shapes)
    arguments = []
    for spec, tensor in zip(specs, tensors.values(), strict=True):
        dims = {axis: dim for axis, dim in enumerate(spec.dims) if isinstance(dim, Dim)}
        for axis in dims:
            if tensor.shape[axis] == 1:
                tensor = torch.cat([tensor, tensor], axis)
        # One tensor given twice would be one input to PyTorch, which traces by identity.
        tensor = tensor.detach().clone()
        arguments.append(Argument(spec.name, tensor, dims))
    return tuple(arguments)


def specs_of(example_inputs: object, dynamic_shapes: object) -> tuple[InputSpec, ...]:
    """The inputs as ``--input`` would describe them.

    Raises:
        UsageError: no mapping from names to tensors, or a shape that cannot be read.
    """
    if not isinstance(example_inputs, Mapping):
        raise _wrong("the inputs have no names", f"a {type(example_inputs).__name__}", "a mapping from name to tensor")
    shapes = _by_name(list(example_inputs), dynamic_shapes)
    texts = []
    for name, tensor in example_inputs.items():
        if not isinstance(tensor, torch.Tensor):
            raise _wrong(f"the input {name} is no tensor", f"a {type(tensor).__name__}", "a tensor")
        axes = _by_axis(name, tensor.ndim, shapes.get(name))
        dims = [_dim_text(name, axis, size, axes.get(axis)) for axis, size in enumerate(tensor.shape)]
        texts.append(f"{name}:{str(tensor.dtype).removeprefix('torch.')}:{','.join(dims)}")
    specs = parse_inputs(texts)
    _check_sizes(specs, example_inputs)
    return specs


def _check_sizes(specs: Sequence[InputSpec], tensors: Mapping[str, object]) -> None:
    """Raises UsageError where an example lies outside the range of its dimension, or one name has two sizes."""
    seen: dict[str, tuple[int, str]] = {}
    for spec in specs:
        for axis, (dim, size) in enumerate(zip(spec.dims, tensors[spec.name].shape, strict=True)):  # type: ignore[attr-defined]
            where = f"axis {axis} of {spec.name}"
            if isinstance(dim, int) and dim != size:
                raise _wrong("the example is not of the size that is asked for", f"{where} is {size}", str(dim), _FIT)
            if not isinstance(dim, Dim):
                continue
            low, high = 1 if dim.low is None else dim.low, dim.high
            if size < low or (high is not None and size > high):
                need = f"an example within the range {low}..{'' if high is None else high} of {dim.name}"
                raise _wrong(f"the example's {dim.name} is outside its range", f"{where} is {size}", need, _FIT)
            first = seen.setdefault(dim.name, (size, where))
            if first[0] != size:
                got = f"{first[1]} is {first[0]} and {where} is {size}"
                raise _wrong(f"the dimension {dim.name} has two sizes", got, "one size wherever the name stands", _FIT)


def _bind(module: torch.nn.Module, example_inputs: object) -> dict[str, torch.Tensor]:
    signature = inspect.signature(module.forward)
    given = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    try:
        if isinstance(given, Mapping):
            bound = signature.bind(**given)
        elif isinstance(given, Sequence):
            bound = signature.bind(*given)
        else:
            raise _wrong("a module needs example inputs", f"a {type(given).__name__}", "tensors for one call")
    except TypeError as error:
        raise _wrong("the example inputs do not fit forward", str(error), f"forward{signature}") from None
    tensors: dict[str, torch.Tensor] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            tensors |= value
        elif value is not None:
            tensors[name] = value
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise _wrong(f"the input {name} is no tensor", f"a {type(value).__name__}", "tensors, or None to leave out")
    return tensors


def _by_name(names: list[str], dynamic_shapes: object) -> dict[str, object]:
    if dynamic_shapes is None:
        return {}
    if isinstance(dynamic_shapes, Mapping):
        unknown = [name for name in dynamic_shapes if name not in names]
        if unknown:
            raise _wrong("a dynamic shape is of no input", f"{unknown[0]!r}", "one of " + ", ".join(names))
        return dict(dynamic_shapes)
    if isinstance(dynamic_shapes, Sequence) and len(dynamic_shapes) <= len(names):
        return dict(zip(names, dynamic_shapes, strict=False))
    raise _wrong("the dynamic shapes cannot be read", repr(dynamic_shapes)[:100], f"one entry for each of {names}")


def _by_axis(name: str, rank: int, spec: object) -> dict[int, object]:
    if spec is None:
        return {}
    axes = dict(spec) if isinstance(spec, Mapping) else None
    if axes is None and isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec) == rank:
        axes = dict(enumerate(spec))
    if axes is None or not all(isinstance(axis, int) and -rank <= axis < rank for axis in axes):
        raise _wrong(f"the dynamic shape of {name} cannot be read", repr(spec)[:100], f"axes 0 to {rank - 1}")
    return {axis % rank: dim for axis, dim in axes.items()}


def _dim_text(name: str, axis: int, size: int, dim: Any) -> str:
    """A dimension as ``--input`` spells it."""
    if dim is None or isinstance(dim, int):
        return str(size if dim is None else dim)
    if isinstance(dim, str):
        return dim
    if isinstance(dim, torch.export.Dim):
        high = "" if dim.max >= sys.maxsize - 1 else dim.max
        return f"{dim.__name__}={max(dim.min, 1)}..{high}"
    raise _wrong(
        f"axis {axis} of {name} has a dimension without a name",
        repr(dim)[:100],
        'a name, "NAME=LOW..HIGH" or a torch.export.Dim, the same one wherever sizes are equal',
    )


def _wrong(what: str, got: str, need: str, do: str = _HOW) -> UsageError:
    return UsageError(what, where="flash_export.export", got=got, need=need, do=do)
