# SPDX-License-Identifier: Apache-2.0
"""Exports PyTorch programs with every exporter that people use, and runs ONNX files in ONNX Runtime."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor
from torch.onnx._internal._lazy_import import onnxscript_apis

EXPORTERS = {"legacy17": (False, 17), "dynamo18": (True, 18), "dynamo23": (True, 23)}
"""Name -> (dynamo, opset)."""


class Wrapped(torch.nn.Module):
    """A function as a module."""

    def __init__(self, forward: Callable[..., object]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, *inputs: Tensor) -> object:
        return self._forward(*inputs)


@functools.cache
def torchlib_operators() -> object:
    """What PyTorch's exporter otherwise reads anew for every model, in half of its time."""
    return onnxscript_apis.get_torchlib_ops()


def capture(
    module: torch.nn.Module, inputs: Sequence[Tensor], axes: Sequence[dict[int, str]] | None
) -> torch.export.ExportedProgram:
    """The program that the dynamo exporters write, whichever opset they write it for."""
    shapes = None if axes is None else tuple(dict.fromkeys(a, torch.export.Dim.DYNAMIC) for a in axes)
    if shapes is not None and isinstance(module, Wrapped):
        shapes = (shapes,)
    with torch.no_grad():
        return torch.export.export(module, tuple(inputs), dynamic_shapes=shapes, strict=False)


def export(
    module: torch.nn.Module | torch.export.ExportedProgram,
    inputs: Sequence[Tensor],
    path: Path,
    exporter: str,
    axes: Sequence[dict[int, str]] | None = None,
) -> list[str]:
    """Writes ``module`` to ``path`` and returns the names of its inputs; ``axes`` None: all dims fixed.

    A captured program has its dynamic axes already.
    """
    dynamo, opset = EXPORTERS[exporter]
    names = [f"input_{i}" for i in range(len(inputs))]
    dynamic: dict[str, object] = {}
    if isinstance(module, torch.export.ExportedProgram):
        assert dynamo, "the legacy exporter takes modules"
    elif axes is not None and dynamo:
        shapes = tuple(dict.fromkeys(a, torch.export.Dim.DYNAMIC) for a in axes)
        dynamic["dynamic_shapes"] = (shapes,) if isinstance(module, Wrapped) else shapes
    elif axes is not None:
        dynamic["dynamic_axes"] = {n: dict(a) for n, a in zip(names, axes, strict=True)}
    quiet = io.StringIO()
    operators = torchlib_operators()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            with mock.patch.object(onnxscript_apis, "get_torchlib_ops", return_value=operators):
                torch.onnx.export(
                    module,
                    tuple(inputs),
                    str(path),
                    dynamo=dynamo,
                    opset_version=opset,
                    input_names=names,
                    external_data=False,
                    **dynamic,  # type: ignore[arg-type]
                )
    finally:
        logging.disable(level)
    return names


def run(model: str | bytes, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The model's outputs in plain ONNX Runtime on the CPU, inputs in the graph's order."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    by_name = {f"input_{i}": x for i, x in enumerate(inputs)}
    feeds = by_name if set(names) <= set(by_name) else dict(zip(names, inputs, strict=True))
    return session.run(None, {n: feeds[n] for n in names})
