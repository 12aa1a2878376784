# SPDX-License-Identifier: Apache-2.0
"""A TorchScript module becomes ONNX by PyTorch's older exporter, the only one that reads TorchScript."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from flash_export.errors import UnsupportedModel, UsageError
from flash_export.export_capture import Call
from flash_export.export_lengths import only_at
from flash_export.load import Loaded

NEWEST_OPSET = 20
"""What the older exporter ends at."""

_LARGEST = 2**14
"""The longest length that is tried where a message names it."""


def run_example(loaded: Loaded, call: Call) -> Any:
    """What the module gives on its example.

    Raises:
        UnsupportedModel: it works at one size of a dynamic dimension alone, which tracing has made of a length.
        UsageError: it works at none that its message names.
    """
    try:
        return call.run(call.tensors)
    except UsageError as error:
        said = error.got.partition("; inputs")[0]
        sizes = {dim.name: a.tensor.shape[axis] for a in loaded.arguments for axis, dim in a.dims.items()}
        for name, named in itertools.product(sizes, sorted({int(number) for number in re.findall(r"\d+", said)})):
            if named != sizes[name] and 0 < named <= _LARGEST and _runs(loaded, call, name, named):
                raise only_at(name, named, sizes[name], said) from error
        raise


def _runs(loaded: Loaded, call: Call, name: str, size: int) -> bool:
    """Whether the module works with ``size`` in the place of the dimension ``name``, on zeros."""
    tensors = []
    for argument in loaded.arguments:
        shape = list(argument.tensor.shape)
        for axis, dim in argument.dims.items():
            shape[axis] = size if dim.name == name else shape[axis]
        tensors.append(torch.zeros(shape, dtype=argument.tensor.dtype))
    try:
        call.run(tensors)
    except UsageError:
        return False
    return True


def translate(loaded: Loaded, opset: int, folder: Path) -> ir.Model:
    """The module as an ONNX graph with the dynamic axes that its arguments ask for.

    Raises:
        UsageError: an opset that the older exporter does not write.
        UnsupportedModel: an operator has no ONNX form.
    """
    if opset > NEWEST_OPSET:
        raise UsageError(
            "TorchScript cannot be exported to this opset",
            where=f"--opset {opset}",
            got=str(opset),
            need=f"at most {NEWEST_OPSET}, where PyTorch's exporter of TorchScript ends",
            do="leave --opset out, or save the model with torch.export.save",
        )
    path = folder / "torchscript.onnx"
    try:
        with _silent(), torch.no_grad():
            torch.onnx.export(
                loaded.module,  # type: ignore[arg-type]
                tuple(argument.tensor for argument in loaded.arguments),
                str(path),
                dynamo=False,
                opset_version=opset,
                input_names=[argument.name for argument in loaded.arguments],
                dynamic_axes={a.name: {axis: dim.name for axis, dim in a.dims.items()} for a in loaded.arguments},
            )
    except Exception as error:  # the exporter raises many types; each is a module it cannot translate
        raise UnsupportedModel(
            "PyTorch cannot translate this TorchScript to ONNX",
            where="torch.onnx.export",
            got=str(error).partition("[Caused by")[0].strip().partition("\n")[0][:300] or type(error).__name__,
            need="operators that have an ONNX form",
            do="save the model with torch.export.save, or give an ONNX file",
        ) from error
    return ir.load(path, format="protobuf")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing goes to stdout: where it fails the exporter prints the whole graph, from C++, past Python's."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere, contextlib.redirect_stdout(io.StringIO()):
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
