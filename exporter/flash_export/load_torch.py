# SPDX-License-Identifier: Apache-2.0
"""A state dict with the callable that builds its model, and, only under ``--trust-pickle``, a whole pickled module."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from flash_export import example
from flash_export.errors import UnsafeInput, UsageError
from flash_export.fit_weights import fill, some, unwrapped
from flash_export.load import FileKind, Loaded
from flash_export.options import ModelSpec, Options
from flash_export.own_code import ANYTHING, import_from_here, is_dotted, raised

_WEIGHTS_UNDER = ("state_dict", "model_state_dict", "model")
"""The keys of a checkpoint under which its weights are looked for."""
_SHOWN = 100
"""A key of the file that is longer is not repeated to the user."""


def load_state_dict(options: Options, kind: FileKind) -> Loaded:
    """Builds the model with ``options.model`` and puts the file's weights into it, strictly.

    Raises:
        UnsafeInput: the file is a pickle that holds more than tensors and plain containers.
        UsageError: no ``--model``, one that cannot be imported or called, weights that do not fit, or wrong inputs.
    """
    path = options.source
    weights = _read_safetensors(path) if kind == "safetensors" else _read_weights(path)
    if options.model is None:
        raise UsageError(
            "a state dict has weights and no model",
            where=str(path),
            got=f"{len(weights)} tensors, {some(weights)}",
            need="the function or class that builds the model they belong to",
            do="--model PKG.MOD:CALLABLE, for example --model mymodels.vit:build; it is called without arguments",
        )
    model = options.model
    module = build_model(model)
    notes = fill(module, weights, path, lambda: build_model(model))
    if options.dtype is None:
        notes = (*notes, *_of_other_types(weights, module))
    module = _finish(module, options)
    return Loaded(path, "state_dict", module, arguments=example.arguments_for(module, options), notes=notes)


def _of_other_types(weights: Mapping[str, torch.Tensor], module: torch.nn.Module) -> list[str]:
    """A note where every weight is of one type and the module of another, which it is exported in."""
    theirs = {weight.dtype for weight in weights.values() if weight.is_floating_point()}
    own = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if len(theirs) != 1 or len(own) != 1 or theirs == own:
        return []
    (there,), (here,) = theirs, own
    name = next((name for name, dtype in example.TORCH_DTYPES.items() if dtype == there), None)
    keep = "" if name is None else f"; --dtype {name} keeps that"
    return [f"the weights are {_spelled(there)} and --model builds a module in {_spelled(here)}, as exported{keep}"]


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_pickled_module(options: Options) -> Loaded:
    """Unpickles a whole module, which may run any code. Called only when the user gave ``--trust-pickle``."""
    path = options.source
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = torch.load(path, map_location="cpu", weights_only=False)  # the user said --trust-pickle
    except Exception as error:
        raise UsageError(
            "the pickled module cannot be loaded",
            where=str(path),
            got=f"{type(error).__name__}: {error}",
            need="a module whose classes can be imported here",
            do="run flash-export in the folder that the module's code is imported from",
        ) from error
    finally:
        sys.path.pop(0)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            "the pickle holds no module",
            where=str(path),
            got=f"a {type(module).__name__}",
            need="a torch.nn.Module, or a state dict with --model",
            do="--model PKG.MOD:CALLABLE if these are weights",
        )
    module = _finish(module, options)
    return Loaded(path, "pickled_module", module, arguments=example.arguments_for(module, options))


def build_model(spec: ModelSpec) -> torch.nn.Module:
    """Imports ``PKG.MOD:CALLABLE``, the working folder on the path, and calls it without arguments.

    A program may give the callable itself.

    Raises:
        UsageError: not of that form, not importable, not callable without arguments, or no module comes back.
    """
    target: Any = spec
    where = f"model={spec!r}"[:100]
    if isinstance(spec, torch.nn.Module):
        need = "the function that builds it: weights go into a module of their own"
        raise _wrong_model("model", f"a {type(spec).__name__} that is built already", need)
    if isinstance(spec, str):
        where = f"--model {spec}"
        target = _imported(spec, where)
    if isinstance(target, torch.nn.Module):
        return target
    _check_callable(target, where)
    try:
        built = target()
    except ANYTHING as error:
        raise _wrong_model(where, raised(error), "a callable that builds the module without an error") from error
    if not isinstance(built, torch.nn.Module):
        raise _wrong_model(where, f"a {type(built).__name__}", "a callable that returns a torch.nn.Module")
    return built


def _imported(spec: str, where: str) -> Any:
    module_name, colon, attribute = spec.partition(":")
    if not colon or not is_dotted(module_name) or not is_dotted(attribute):
        raise _wrong_model(where, f"{spec!r}", "PKG.MOD:CALLABLE, for example mymodels.vit:build")
    try:
        target: Any = import_from_here(module_name)
    except ANYTHING as error:
        need = f"a module that can be imported from {Path.cwd()}"
        raise _wrong_model(where, raised(error), need) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise _wrong_model(where, f"no {part!r} in {target!r}", "a name that the module defines")
        target = getattr(target, part)
    return target


def _check_callable(target: Callable[..., object], where: str) -> None:
    if not callable(target):
        raise _wrong_model(where, f"a {type(target).__name__}", "a function or class")
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise _wrong_model(where, str(error), "a callable that needs no arguments; wrap it in a function") from None
    except ValueError:
        return  # a builtin without a signature: calling it says what is wrong


def _wrong_model(where: str, got: str, need: str) -> UsageError:
    return UsageError(
        "the model cannot be built",
        where=where,
        got=got,
        need=need,
        do="name a function or class that returns the module, in a file below the working folder",
    )


def _finish(module: torch.nn.Module, options: Options) -> torch.nn.Module:
    module = unwrapped(module) if type(module).__name__ in ("OptimizedModule", "DataParallel") else module
    if options.dtype is not None:
        module = module.to(example.TORCH_DTYPES[options.dtype])
    return module.eval().requires_grad_(False)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        weights: dict[str, torch.Tensor] = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise UsageError(
            "the safetensors file cannot be read",
            where=str(path),
            got=str(error),
            need="a whole safetensors file",
            do="check that the file was copied whole",
        ) from None
    return weights


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a ``.pt``, by PyTorch's weights-only unpickler and nothing else.

    A checkpoint that keeps its weights under one of ``_WEIGHTS_UNDER`` is taken apart.
    """
    try:
        if path.name.endswith(".safetensors"):  # torch.load would go by that name; an open file has none
            with path.open("rb") as file:
                found = torch.load(file, map_location="cpu", weights_only=True)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=_can_mmap(path))
    except pickle.UnpicklingError as error:
        raise _unsafe_pickle(path, error) from None
    except Exception as error:  # a broken archive raises RuntimeError, EOFError, KeyError, struct.error and more
        raise UsageError(
            "the weights cannot be read",
            where=str(path),
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}",
            need="a file written by torch.save",
            do="check that the file was copied whole",
        ) from None
    for key in _WEIGHTS_UNDER:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in found.items()
    ):
        raise _no_state_dict(path, found)
    return found


def _no_state_dict(path: Path, found: object) -> UsageError:
    got, do = f"a {type(found).__name__}", "torch.save(model.state_dict(), path)"
    if isinstance(found, dict):
        got += f" with keys {some(found)}"
        inside = next((key for key, value in found.items() if _is_state_dict(value)), None)
        if inside is not None and len(repr(inside)) < _SHOWN:
            do = f"torch.save(torch.load({path.name!r})[{inside!r}], path): the weights are under {inside!r}"
    return UsageError(
        "the file holds no state dict",
        where=str(path),
        got=got,
        need="names and tensors, as module.state_dict() gives them, by themselves or under "
        + ", ".join(map(repr, _WEIGHTS_UNDER[:-1]))
        + f" or {_WEIGHTS_UNDER[-1]!r}",
        do=do,
    )


def _is_state_dict(found: object) -> bool:
    if not isinstance(found, dict) or not found:
        return False
    return all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items())


def _can_mmap(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def named_in_pickle(error: pickle.UnpicklingError) -> str:
    """What PyTorch's weights-only unpickler stopped at, in a few words."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f"a pickle that names {found[1][:200]}" if found else "a pickle with more than tensors and plain containers"


def _unsafe_pickle(path: Path, error: pickle.UnpicklingError) -> UnsafeInput:
    return UnsafeInput(
        "the file is a pickle that names code",
        where=str(path),
        got=named_in_pickle(error),
        need="tensors and plain containers only; anything else in a pickle can run code on loading",
        do="save model.state_dict() and give --model, save with torch.export.save, or, for a whole module of your own, "
        "--trust-pickle without --model",
    )
