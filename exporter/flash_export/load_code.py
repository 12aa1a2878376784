# SPDX-License-Identifier: Apache-2.0
"""Archives that carry code: TorchScript and torch.package. Opened only when the user gave ``--trust-pickle``."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from flash_export import example
from flash_export.errors import UnsafeInput, UsageError
from flash_export.load import Loaded
from flash_export.options import Options

_SAFE = "save it with torch.export.save(torch.export.export(model, ...)), or its state_dict() for use with --model"


def load_torchscript(options: Options) -> Loaded:
    """A scripted or traced module, its inputs as ``--input`` describes them.

    Raises:
        UnsafeInput: without ``--trust-pickle``.
        UsageError: it cannot be loaded, or ``--input`` names other inputs than its forward takes.
    """
    path = options.source
    if not options.trust_pickle:
        raise _carries_code(path, "a TorchScript archive carries code", "a TorchScript archive (torch.jit.save)")
    try:
        module: Any = torch.jit.load(path, map_location="cpu").eval()
    except Exception as error:  # torch.jit raises RuntimeError and more
        raise _cannot_load(path, error) from error
    if options.dtype is not None:
        module = module.to(example.TORCH_DTYPES[options.dtype])
    taken = [argument.name for argument in module.forward.schema.arguments[1:]]
    required = [a.name for a in module.forward.schema.arguments[1:] if not a.has_default_value()]
    given = [spec.name for spec in options.inputs]
    if not set(required) <= set(given) <= set(taken) or set(taken[: len(given)]) != set(given):
        raise UsageError(
            "the inputs are not those of the TorchScript module",
            where=f"forward in {path}",
            got=", ".join(f"--input {name}" for name in given) or "no --input",
            need="forward takes " + ", ".join(taken),
            do=example.suggested(required, module),
        )
    specs = tuple(sorted(options.inputs, key=lambda spec: taken.index(spec.name)))
    return Loaded(path, "torchscript", module, arguments=example.draw_arguments(specs), by_position=True)


def load_package(options: Options) -> Loaded:
    """The one module that a torch.package holds, its inputs as ``--input`` describes them.

    Raises:
        UnsafeInput: without ``--trust-pickle``.
        UsageError: it cannot be loaded, or holds no pickled module, or several.
    """
    path = options.source
    if not options.trust_pickle:
        what = "a torch.package carries Python source that runs on loading"
        raise _carries_code(path, what, "a torch.package archive")
    with zipfile.ZipFile(path) as archive:
        members = [name.partition("/")[2] for name in archive.namelist()]
    pickles = [name for name in members if name.endswith(".pkl") and not name.startswith(".data/")]
    if len(pickles) != 1:
        raise UsageError(
            "the torch.package does not say which module is meant",
            where=str(path),
            got=f"{len(pickles)} pickles: {', '.join(pickles[:5])}",
            need="one",
            do="save the module alone with save_pickle, or " + _SAFE,
        )
    package, _, resource = pickles[0].rpartition("/")
    try:
        module = torch.package.PackageImporter(path).load_pickle(package.replace("/", "."), resource, "cpu")
    except Exception as error:  # the package runs code of its own
        raise _cannot_load(path, error) from error
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            "the torch.package holds no module",
            where=f"{pickles[0]} in {path}",
            got=f"a {type(module).__name__}",
            need="a torch.nn.Module",
            do=_SAFE,
        )
    if options.dtype is not None:
        module = module.to(example.TORCH_DTYPES[options.dtype])
    module = module.eval().requires_grad_(False)
    return Loaded(path, "torch_package", module, arguments=example.arguments_for(module, options))


def _carries_code(path: Path, what: str, got: str) -> UnsafeInput:
    return UnsafeInput(
        what,
        where=str(path),
        got=got,
        need="a file that holds weights or a graph, not code",
        do=f"{_SAFE}; --trust-pickle opens a file that you made yourself",
    )


def _cannot_load(path: Path, error: Exception) -> UsageError:
    return UsageError(
        "the archive cannot be loaded",
        where=str(path),
        got=f"{type(error).__name__}: {str(error)[:300]}",
        need="an archive that this version of PyTorch loads",
        do="check that the file was copied whole; " + _SAFE,
    )
