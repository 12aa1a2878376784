# SPDX-License-Identifier: Apache-2.0
"""How PyTorch's refusals are read, and how tensors travel to NumPy and back."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from flash_export import export_capture

RANGES: dict[str, tuple[int, int | None]] = {"batch": (1, None), "seq": (1, 600)}


def suggestion(*lines: str) -> str:
    return (
        "Constraints violated (seq)!\n  - reasons\nSuggested fixes:\n  "
        + "\n  ".join(lines)
        + "\n\nThe error above ..."
    )


@pytest.mark.parametrize(
    ("lines", "narrowed"),
    [
        (["seq = Dim('seq', max=512)"], {"seq": (1, 512)}),
        (["seq = Dim('seq', min=3, max=512)"], {"seq": (3, 512)}),
        (["batch = Dim('batch', min=2)", "seq = Dim('seq', max=512)"], {"batch": (2, None), "seq": (1, 512)}),
        (["seq = Dim('seq', max=900)"], None),
        (["seq = 7"], None),
        (["seq = 8*_seq"], None),
        (["_other = Dim('_other', max=512)"], None),
        (["seq = Dim('seq', max=512)", "batch = 2"], None),
    ],
)
def test_only_a_narrower_range_is_taken_up(lines: list[str], narrowed: dict | None) -> None:
    assert export_capture._narrowed(suggestion(*lines), RANGES) == narrowed


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (torch.ones(1), ["output"]),
        ((torch.ones(1), None, [torch.ones(1)]), ["output_0", "output_2_0"]),
        ({"a": torch.ones(1), "b": (torch.ones(1),)}, ["a", "b_0"]),
        (collections.OrderedDict({"a b": torch.ones(1), "n": 3}), ["a_b"]),
    ],
)
def test_outputs_are_named_after_their_keys(outputs: object, names: list[str]) -> None:
    assert export_capture.output_names(outputs) == names
    assert len(export_capture.tensors_in(outputs)) == len(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_a_tensor_comes_back_from_numpy_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    back = export_capture.from_numpy(export_capture.to_numpy(tensor))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_transposed_array_goes_to_pytorch_as_it_reads() -> None:
    array = np.arange(6.0).reshape(2, 3).T
    assert export_capture.from_numpy(array).tolist() == array.tolist()
