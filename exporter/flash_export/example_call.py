# SPDX-License-Identifier: Apache-2.0
"""Example inputs and dynamic shapes as a program gives them, for a module that is in memory already."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flash_export.errors import UsageError
from flash_export.inputs import parse_inputs
from flash_export.load import Argument, Loaded, refuse_flags
from flash_export.options import Dim, InputSpec, Options

_HOW = "describe forward's tensors, or give torch.export.export's ExportedProgram, which takes every kind of call"

_SHAPES = 'write it as {"x": {0: "batch", 1: "seq=1..512"}}, from input to axis to dimension'

_FIT = "give another example, or other dynamic_shapes"


def opened(source: object, example_inputs: object, dynamic_shapes: object, options: Options) -> Loaded:
    """The module or program as ``load`` would have returned it.

    Raises:
        UsageError: neither a module nor a program, one in training mode, or inputs that do not fit.
    """
    path = Path(type(source).__name__)
    if options.kv_cache:
        need = "the folder of a causal language model, as save_pretrained writes it"
        do = "save it there and give its path, or write past keys and values as inputs of a forward of your own"
        raise _wrong("kv_cache needs a Hugging Face folder", "what is in memory", need, do)
    if isinstance(source, torch.export.ExportedProgram):
        refuse_flags(options, "exported_program")
        if example_inputs is not None or dynamic_shapes is not None:
            got = "example_inputs or dynamic_shapes"
            raise _wrong("an ExportedProgram brings its own inputs", got, "neither", f"leave {got} out")
        return Loaded(path, "exported_program", program=source)
    if not isinstance(source, torch.nn.Module):
        need = "a module, a program or a path"
        do = "give one of them; flash_export.rewrite takes ONNX models that are in memory"
        raise _wrong("the source is of no kind known", f"a {type(source).__name__}", need, do)
    if source.training:
        raise UsageError(
            "the module is in training mode",
            where=type(source).__name__,
            got="module.training is True",
            need="a module whose dropout and norms are as in inference",
            do="call module.eval() first",
        )
    if options.dtype is not None or options.model is not None:
        need = "neither: both are the module's own"
        raise _wrong("a module brings its own weights and types", "dtype or model", need, "module.to(dtype) casts it")
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
        need, do = "a mapping from name to tensor", 'give them by name: {"input_ids": tensor}'
        raise _wrong("the inputs have no names", f"a {type(example_inputs).__name__}", need, do)
    shapes = _by_name(list(example_inputs), dynamic_shapes)
    texts = []
    for name, tensor in example_inputs.items():
        if not isinstance(tensor, torch.Tensor):
            raise _wrong(f"the input {name} is no tensor", _kind(tensor), "a tensor", _as_tensor(name, tensor))
        axes = _by_axis(name, tensor.ndim, shapes.get(name))
        dims = [_dim_text(name, axis, size, axes.get(axis)) for axis, size in enumerate(tensor.shape)]
        texts.append(f"{name}:{str(tensor.dtype).removeprefix('torch.')}:{','.join(dims)}")
    try:
        specs = parse_inputs(texts)
    except UsageError as error:  # in the words of the command's flag, which nobody wrote here
        do = 'write a dimension as "NAME" or "NAME=LOW..HIGH", or give a torch.export.Dim; an input, as a tensor'
        if "*" in error.got:
            do = (
                "in place of the module give torch.export.export(module, ..., dynamic_shapes=...), a program whose axes"
                " may be multiples; or give the axis a name of its own"
            )
        at = [text for text in texts if text in error.where]  # the whole input as text; a name where ranges differ
        got = f"{error.got}, of the input {at[0].split(':')[0]}" if at else error.got
        raise _wrong(error.what, got, error.need, do) from None
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
            got = "none" if given is None else _kind(given)
            raise _wrong("a module needs example inputs", got, "tensors for one call", _call_of(signature))
    except TypeError as error:
        raise _unbound(signature, given, error) from None
    tensors: dict[str, torch.Tensor] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            tensors |= value
        elif value is not None:
            tensors[name] = value
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            need = "tensors, or None to leave out"
            raise _wrong(f"the input {name} is no tensor", _kind(value), need, _as_tensor(name, value))
    return tensors


def _unbound(signature: inspect.Signature, given: object, error: Exception) -> UsageError:
    """Inputs that forward cannot be called with: by name, those that it does not take and those that it lacks."""
    got = str(error)
    if isinstance(given, Mapping):
        kinds = inspect.Parameter
        taken = {
            n: p for n, p in signature.parameters.items() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        }
        open_ended = any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values())
        unknown = [] if open_ended else [str(name) for name in given if name not in taken]
        missing = [name for name, p in taken.items() if p.default is p.empty and name not in given]
        parts = [f"{', '.join(map(repr, unknown))}, which forward does not take"] if unknown else []
        parts += [f"no {', '.join(map(repr, missing))}"] if missing else []
        got = "; ".join(parts) or got
    return _wrong("the example inputs do not fit forward", got, f"forward{signature}", _call_of(signature))


def _call_of(signature: inspect.Signature) -> str:
    """The call that forward's parameters ask for."""
    kinds = inspect.Parameter
    needed = [
        name
        for name, p in signature.parameters.items()
        if p.default is p.empty and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]
    shown = ", ".join(f'"{name}": {name}' for name in needed or ["NAME"])
    return f"give the tensors of one call by name: export(module, {{{shown}}}, ...)"


def _kind(value: object) -> str:
    return "a NumPy array" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _as_tensor(name: str, value: object) -> str:
    return f"give torch.from_numpy({name})" if isinstance(value, np.ndarray) else _HOW


def _by_name(names: list[str], dynamic_shapes: object) -> dict[str, object]:
    if dynamic_shapes is None:
        return {}
    if isinstance(dynamic_shapes, Mapping):
        unknown = [name for name in dynamic_shapes if name not in names]
        if unknown:
            need = "one of " + ", ".join(names)
            raise _wrong("a dynamic shape is of no input", f"{unknown[0]!r}", need, "name an input of example_inputs")
        return dict(dynamic_shapes)
    if isinstance(dynamic_shapes, Sequence) and len(dynamic_shapes) <= len(names):
        return dict(zip(names, dynamic_shapes, strict=False))
    need = f"one entry for each of {names}"
    raise _wrong("the dynamic shapes cannot be read", repr(dynamic_shapes)[:100], need, _SHAPES)


def _by_axis(name: str, rank: int, spec: object) -> dict[int, object]:
    if spec is None:
        return {}
    axes = dict(spec) if isinstance(spec, Mapping) else None
    if axes is None and isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec) == rank:
        axes = dict(enumerate(spec))
    if axes is None or not all(isinstance(axis, int) and -rank <= axis < rank for axis in axes):
        need = f"axes 0 to {rank - 1}" if rank else "no axis: it is a scalar"
        raise _wrong(f"the dynamic shape of {name} cannot be read", repr(spec)[:100], need, _SHAPES)
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
        f'give it a name, the same one wherever sizes are equal: dynamic_shapes={{"{name}": {{{axis}: "seq"}}}}',
    )


def _wrong(what: str, got: str, need: str, do: str) -> UsageError:
    return UsageError(what, where="flash_export.export", got=got, need=need, do=do)
