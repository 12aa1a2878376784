# SPDX-License-Identifier: Apache-2.0
"""What a fused file gives on padded inputs, beside PyTorch: every valid token right, whatever stands in the padding."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime as ort
import torch
from corpus.families import Adapter, Family, Sizes

MASKS = {
    "none": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1, 0]],
}
LENGTHS = (Sizes(2, 7, 5), Sizes(1, 1, 1), Sizes(3, 11, 4))
"""Beside the padded ones; no export was made at the last two."""


def assert_right_on_valid_tokens(path: Path, family: Family, model: Adapter, *, single: bool = False) -> float:
    """Compares the file with PyTorch in float64, as close as PyTorch in float32 is (twice that, and 2 ulp).

    Only tokens whose mask is 1 count; what a model computes for padding is nobody's business. ``single`` compares the
    first row alone, for exports that only run on one. Returns the largest error.
    """
    wide = copy.deepcopy(model).double()
    worst: list[tuple[str, float]] = []
    allowed = largest = 0.0
    for label, drawn in _inputs(family):
        inputs = [x[:1] for x in drawn] if single else drawn
        with torch.no_grad():
            base = [t.numpy() for t in model(*inputs)]
            with softmax_in_float64():
                right = [t.numpy() for t in wide(*(x.double() if x.is_floating_point() else x for x in inputs))]
        got = run(path, family, inputs)
        for output, reference, plain in zip(got, right, base, strict=True):
            valid = _valid(family, inputs, reference.shape)
            error, own = (np.abs(x - reference)[valid].max(initial=0.0) for x in (output, plain))
            assert np.isfinite(error), label
            worst.append((label, float(error)))
            allowed, largest = max(allowed, float(own)), max(largest, float(np.abs(reference[valid]).max(initial=0.0)))
    tolerance = 2 * allowed + 2 * float(np.spacing(np.float32(largest)))
    assert [w for w in worst if w[1] > tolerance] == [], f"allowed {tolerance}"
    return max(error for _, error in worst)


@contextlib.contextmanager
def softmax_in_float64() -> Iterator[None]:
    """transformers' eager attention rounds its scores to float32, where float64's smallest number is -inf."""
    softmax = torch.nn.functional.softmax
    with mock.patch.object(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim)):
        yield


def run(path: Path, family: Family, inputs: list[torch.Tensor]) -> list[np.ndarray]:
    """The family's outputs in plain ONNX Runtime. A file from a model folder has names, and inputs of its own."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4  # an export that does not run is part of the corpus
    session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    by_name = dict(zip(family.inputs, (x.numpy() for x in inputs), strict=True))
    if not set(by_name) <= set(names):
        return session.run(None, dict(zip(names, by_name.values(), strict=True)))
    zeros = np.zeros(by_name["input_ids"].shape, np.int64) if "token_type_ids" in names else None
    return session.run(list(family.outputs), {n: by_name.get(n, zeros) for n in names})


def _inputs(family: Family) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for sizes in LENGTHS:
        yield str(sizes), family.draw(sizes, seed=2)
    if "attention_mask" in family.inputs:
        for label, rows in MASKS.items():
            inputs = family.draw(Sizes(), seed=3)
            inputs[family.inputs.index("attention_mask")] = torch.tensor(rows)
            yield label, inputs


def _valid(family: Family, inputs: list[torch.Tensor], shape: tuple[int, ...]) -> np.ndarray:
    """Where the output of ``shape`` counts: all of it, unless its second axis is the masked sequence."""
    if "attention_mask" not in family.inputs or len(shape) < 3 or "decoder_input_ids" in family.inputs:
        return np.ones(shape, bool)
    mask = inputs[family.inputs.index("attention_mask")].numpy() == 1
    return np.broadcast_to(mask.reshape(*mask.shape, *[1] * (len(shape) - 2)), shape)
