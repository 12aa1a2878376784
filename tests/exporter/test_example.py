# SPDX-License-Identifier: Apache-2.0
"""The tensors that forward is traced with: names checked, sizes inside their ranges, never 0 or 1."""

from __future__ import annotations

import pytest
import torch
from exporter.torch_models import Attention, Block

from flash_export.errors import UsageError
from flash_export.example import arguments_for, example_sizes, make_arguments, suggested
from flash_export.inputs import parse_inputs
from flash_export.options import Options


def options(*inputs: str) -> Options:
    return Options(source=None, inputs=parse_inputs(inputs))  # type: ignore[arg-type]


def test_an_unknown_input_is_named_beside_those_that_forward_takes() -> None:
    with pytest.raises(UsageError) as error:
        arguments_for(Block(), options("y:float32:2,3,24"))
    assert error.value.what == "an input is unknown: y"
    assert error.value.need == "forward takes x, [mask]"


def test_without_inputs_the_error_shows_how_to_spell_them() -> None:
    with pytest.raises(UsageError) as error:
        arguments_for(Attention(), options())
    assert error.value.what == "an input is missing: q"
    assert "--input q:float32:" in error.value.do


def test_arguments_come_in_the_order_of_forward() -> None:
    arguments = arguments_for(Attention(), options("v:float32:7,5", "q:float32:3,5", "k:float32:7,5"))
    assert [a.name for a in arguments] == ["q", "k", "v"]


def test_any_name_goes_where_forward_takes_keywords() -> None:
    class Any(torch.nn.Module):
        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            return inputs["x"]

    assert [a.name for a in arguments_for(Any(), options("x:int32:3"))] == ["x"]


def test_example_sizes_differ_and_stay_in_their_ranges() -> None:
    specs = parse_inputs(["x:float32:a,b,c=1..3,d=40..,e=1..2,f=20..30"])
    sizes = example_sizes(specs)
    assert sizes == {"a": 2, "b": 7, "c": 3, "d": 40, "e": 2, "f": 20}


def test_example_tensors_have_the_types_asked_for() -> None:
    specs = parse_inputs(["a:bf16:n,3", "b:int8:n", "c:bool:", "d:float64:0"])
    arguments = make_arguments(Block(), specs)
    assert [(a.tensor.dtype, tuple(a.tensor.shape)) for a in arguments] == [
        (torch.bfloat16, (2, 3)),
        (torch.int8, (2,)),
        (torch.bool, ()),
        (torch.float64, (0,)),
    ]


class Embeds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(7, 4)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + attention_mask + image


@pytest.mark.parametrize(
    ("names", "module", "types"),
    [
        (["ids", "attention_mask", "image"], Embeds(), ["int64", "int64", "float32"]),
        (["input_ids", "pixel_values"], Embeds(), ["int64", "float32"]),
        (["x"], Embeds(), ["int64"]),
        (["ids", "mask"], torch.nn.Linear(2, 2), ["float32", "float32"]),
    ],
)
def test_flags_are_suggested_that_parse_and_are_integers_for_an_embedding(
    names: list[str], module: torch.nn.Module, types: list[str]
) -> None:
    for form in (module, torch.jit.script(module)):
        flags = [flag for flag in suggested(names, form).split() if flag != "--input"]
        assert [spec.dtype for spec in parse_inputs(flags)] == types


@pytest.mark.parametrize("dtype", ["int64", "float32", "float16"])
def test_boxes_have_their_corners_in_order_and_stay_within_the_page(dtype: str) -> None:
    for seed in range(5):
        (boxes,) = make_arguments(Block(), parse_inputs([f"bbox:{dtype}:batch,seq,4"]), seed)
        left, top, right, bottom = boxes.tensor.float().unbind(-1)
        assert ((left >= 0) & (left <= right) & (right <= 1)).all()
        assert ((top >= 0) & (top <= bottom) & (bottom <= 1)).all()
        assert (left < right).any()
        assert (top < bottom).any()


def test_the_sides_of_other_names_and_lengths_are_left_as_they_come() -> None:
    specs = parse_inputs(["boxes:int64:n,4", "bbox:int64:m,5"])
    before = make_arguments(Block(), specs)
    generator = torch.Generator().manual_seed(0)
    for argument, shape in zip(before, [(2, 4), (7, 5)], strict=True):
        assert torch.equal(argument.tensor, torch.randint(0, 2, shape, generator=generator))
