# SPDX-License-Identifier: Apache-2.0
"""``--input`` is read as written, and every mistake in it is named."""

from __future__ import annotations

import pytest

from flash_export.errors import UsageError
from flash_export.inputs import parse_inputs
from flash_export.options import Dim, InputSpec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("x:float32:batch,64,256", InputSpec("x", "float32", (Dim("batch"), 64, 256))),
        ("ids:int64:batch,seq=1..512", InputSpec("ids", "int64", (Dim("batch"), Dim("seq", 1, 512)))),
        ("x:bf16:seq=3..", InputSpec("x", "bfloat16", (Dim("seq", 3, None),))),
        ("t:float32:", InputSpec("t", "float32", ())),
        ("a.b:bool:0", InputSpec("a.b", "bool", (0,))),
        ("x:fp32:n=4..4", InputSpec("x", "float32", (4,))),
    ],
)
def test_an_input_is_read_as_written(text: str, spec: InputSpec) -> None:
    assert parse_inputs([text]) == (spec,)


def test_a_range_given_once_holds_wherever_the_name_stands() -> None:
    first, second = parse_inputs(["a:int64:batch,seq", "b:int64:batch=2..9,seq=1..7"])
    assert first.dims == second.dims == (Dim("batch", 2, 9), Dim("seq", 1, 7))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x", "an input cannot be read"),
        ("x:float32", "an input cannot be read"),
        ("1x:float32:2", "an input cannot be read"),
        ("x:float33:2", "an input has an unknown element type"),
        ("x:float32:2,-1", "a dimension cannot be read"),
        ("x:float32:2,,3", "a dimension cannot be read"),
        ("x:float32:seq=a..b", "a range cannot be read"),
        ("x:float32:seq=9..3", "a range is empty or too large"),
        ("x:float32:seq=0..0", "a range is empty or too large"),
        ("x:float32:99999999999", "a dimension is too large"),
        ("x:float32:1,1,1,1,1,1,1,1,1", "an input has too many dimensions"),
    ],
)
def test_a_mistake_is_named_with_the_text_it_is_in(text: str, what: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_inputs([text])
    assert error.value.what == what
    assert text in error.value.where


def test_a_range_that_begins_at_0_begins_at_the_least_that_pytorch_traces() -> None:
    (spec,) = parse_inputs(["past:float32:batch,past=0..512,8"])
    assert spec.dims == (Dim("batch"), Dim("past", 1, 512), 8)


def test_an_input_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_inputs(["x:float32:2", "x:float32:3"])


def test_two_ranges_for_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two ranges"):
        parse_inputs(["x:float32:seq=1..8", "y:float32:seq=1..9"])
