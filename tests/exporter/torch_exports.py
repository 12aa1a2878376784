# SPDX-License-Identifier: Apache-2.0
"""Exports PyTorch programs with every exporter that people use, and runs ONNX files in ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

EXPORTERS = {"legacy17": (False, 17), "dynamo18": (True, 18), "dynamo23": (True, 23)}
"""Name -> (dynamo, opset)."""


class Wrapped(torch.nn.Module):
    """A function as a module."""

    def __init__(self, forward: Callable[..., object]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, *inputs: Tensor) -> object:
        return self._forward(*inputs)


def export(
    module: torch.nn.Module,
    inputs: Sequence[Tensor],
    path: Path,
    exporter: str,
    axes: Sequence[dict[int, str]] | None = None,
) -> list[str]:
    """Writes ``module`` to ``path`` and returns the names of its inputs; ``axes`` None: all dims fixed."""
    dynamo, opset = EXPORTERS[exporter]
    names = [f"input_{i}" for i in range(len(inputs))]
    dynamic: dict[str, object] = {}
    if axes is not None and dynamo:
        shapes = tuple(dict.fromkeys(a, torch.export.Dim.DYNAMIC) for a in axes)
        dynamic["dynamic_shapes"] = (shapes,) if isinstance(module, Wrapped) else shapes
    elif axes is not None:
        dynamic["dynamic_axes"] = {n: dict(a) for n, a in zip(names, axes, strict=True)}
    quiet = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            warnings.simplefilter("ignore")
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
