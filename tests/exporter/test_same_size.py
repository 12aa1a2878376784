# SPDX-License-Identifier: Apache-2.0
"""Two dimensions that should have been one are told apart from other failures of forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flash_export import export_capture
from flash_export.errors import UsageError
from flash_export.example import arguments_for
from flash_export.inputs import parse_inputs
from flash_export.load import Loaded
from flash_export.options import Options


class Masked(torch.nn.Module):
    def forward(self, ids: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return ids[:, None, :, None] + pad[:, None, None, :] + (ids + pad)[:, None, None]


class Joined(torch.nn.Module):
    def forward(self, ids: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return torch.cat([ids, pad])


class Expanded(torch.nn.Module):
    def forward(self, ids: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return ids.expand(pad.shape)


class Fails(torch.nn.Module):
    def forward(self, ids: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        raise ValueError("7 is an odd number of tokens, as are 5 and 2")


ONE_NAME = "where axis 1 of ids (seq) and axis 1 of pad ({}) are one size, give both the name seq"


@pytest.mark.parametrize(
    ("module", "pad", "advice"),
    [
        (Masked(), "batch,len", ONE_NAME.format("len")),
        (Masked(), "batch,16", ONE_NAME.format("the number 16")),
        (Masked(), "2,seq", ""),
        (Joined(), "batch,len", ONE_NAME.format("len")),
        (Expanded(), "batch,len", ONE_NAME.format("len")),
        (Expanded(), "batch,16", ONE_NAME.format("the number 16")),
        (Fails(), "batch,len", "check names, types and sizes of --input"),
    ],
)
def test_inputs_of_two_sizes_that_must_be_one_are_told_to_share_a_name(
    module: torch.nn.Module, pad: str, advice: str
) -> None:
    options = Options(source=Path("w.pt"), inputs=parse_inputs(["ids:int64:batch,seq", f"pad:int64:{pad}"]))
    loaded = Loaded(options.source, "state_dict", module, arguments=arguments_for(module, options))
    call = export_capture.call_of(loaded)
    if not advice:
        assert call.run(call.tensors).shape
        return
    with pytest.raises(UsageError, match="fails on the inputs") as error:
        call.run(call.tensors)
    assert error.value.do.startswith(advice)
