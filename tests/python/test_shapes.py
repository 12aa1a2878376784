# SPDX-License-Identifier: Apache-2.0
"""Shapes are read as trtexec spells them, checked against the model, and printed back the same."""

from __future__ import annotations

import pytest

from flash_export.errors import UsageError
from flash_trt.onnx_file import GraphInput
from flash_trt.shapes import ShapeRange, parse, plan_profile

IDS = GraphInput("input_ids", 7, ("batch", "seq"))
MASK = GraphInput("attention_mask", 7, ("batch", "seq"))
FIXED = GraphInput("table", 1, (3, 20))
NAMELESS = GraphInput("x", 1, ("", 20))


def test_three_shapes_are_smallest_usual_largest() -> None:
    assert parse("input_ids:1x1,4x512,8x4096") == ShapeRange("input_ids", (1, 1), (4, 512), (8, 4096))


def test_one_shape_stands_for_all_three() -> None:
    assert parse("x:4x512") == ShapeRange("x", (4, 512), (4, 512), (4, 512))


def test_an_input_name_may_hold_colons() -> None:
    assert parse("serving:input:0:7").name == "serving:input:0"


def test_what_is_printed_reads_back() -> None:
    text = "input_ids:1x1,4x512,8x4096"
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "x:", ":1x2", "x:1x2,3x4", "x:1,2,3,4", "x:1xa", "x:-1x2", "x:1x2,1x2x3,1x2", "x:4x2,2x2,8x2",
        "x:1 x2", "x:1x2147483648x64", "x:1x" + "9" * 5000, "x:1x²", "x:1x٣",
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_another_spelling_is_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(UsageError, match="--shape"):
        parse(text)


def test_a_symbol_that_one_input_settles_holds_for_the_others() -> None:
    profile = plan_profile([IDS, MASK], [parse("input_ids:1x1,4x64,8x200")])
    assert profile.ranges[1] == ShapeRange("attention_mask", (1, 1), (4, 64), (8, 200))
    assert profile.chosen == {}


def test_dims_left_open_get_a_default_that_is_told() -> None:
    profile = plan_profile([IDS, NAMELESS], [])
    assert profile.chosen == {"batch": (1, 1, 8), "seq": (1, 128, 512), "x[0]": (1, 1, 8)}
    assert profile.ranges[1] == ShapeRange("x", (1, 20), (1, 20), (8, 20))


def test_a_dim_without_a_name_is_settled_by_the_shape_of_its_input() -> None:
    other = GraphInput("z", 1, ("", 20))
    profile = plan_profile([NAMELESS, other], [parse("x:2x20,3x20,4x20")])
    assert profile.chosen == {"z[0]": (1, 1, 8)}
    assert [str(range_) for range_ in profile.ranges] == ["x:2x20,3x20,4x20", "z:1x20,1x20,8x20"]
    both = plan_profile([NAMELESS, other], [parse("x:2x20,3x20,4x20"), parse("z:1x20")])  # nothing says they are alike
    assert both.chosen == {}


def test_a_default_stays_within_what_the_model_says() -> None:
    profile = plan_profile([IDS], [], {"batch": (2, 4), "seq": (1, 77), "other": (5, 5)})
    assert profile.chosen == {"batch": (2, 2, 4), "seq": (1, 77, 77)}


def test_a_past_may_be_empty_by_default() -> None:
    past = GraphInput("key", 1, ("batch", 2, "past_sequence_length", 16))
    assert plan_profile([past], []).chosen["past_sequence_length"] == (0, 128, 512)
    assert plan_profile([past], [], {"past_sequence_length": (1, 60)}).chosen["past_sequence_length"] == (0, 60, 60)
    assert plan_profile([past], [], {"past_sequence_length": (2, 60)}).chosen["past_sequence_length"] == (2, 60, 60)


def test_a_length_with_which_the_model_does_not_work_is_refused() -> None:
    with pytest.raises(UsageError, match=r"seq in 1\.\.77"):
        plan_profile([IDS], [parse("input_ids:1x1,1x5,1x78")], {"seq": (1, 77)})


def test_a_past_is_empty_where_the_range_begins_at_the_least_that_pytorch_traces() -> None:
    past = GraphInput("key", 1, ("batch", 2, "past", 16))
    given = [parse("key:1x2x0x16,1x2x8x16,1x2x64x16")]
    (range_,) = plan_profile([past], given, {"past": (1, 64)}).ranges
    assert range_ == given[0]
    with pytest.raises(UsageError, match=r"past in 2\.\.64"):
        plan_profile([past], given, {"past": (2, 64)})


IMAGE = GraphInput("img", 1, ("batch", 3, "16*h", "16*w + 1"))


def test_a_symbol_that_stands_in_a_multiple_alone_is_settled_by_its_size() -> None:
    other = GraphInput("table", 1, ("h", "w"))
    profile = plan_profile([IMAGE, other], [parse("img:1x3x32x33,1x3x64x49,2x3x128x65")], {"h": (2, 16), "w": (2, 16)})
    assert [str(range_) for range_ in profile.ranges] == ["img:1x3x32x33,1x3x64x49,2x3x128x65", "table:2x2,4x3,8x4"]
    assert not profile.chosen


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("img:1x3x33x33", r"a whole number for h in 16\*h"),
        ("img:1x3x32x32", r"a whole number for w in 16\*w \+ 1"),
        ("img:1x3x16x33", r"h in 2\.\.16"),
        ("img:1x3x512x33", r"h in 2\.\.16"),
    ],
)
def test_a_size_that_no_whole_number_makes_is_refused(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_profile([IMAGE], [parse(given)], {"h": (2, 16), "w": (2, 16)})


def test_a_shape_for_a_model_without_inputs_says_so() -> None:
    with pytest.raises(UsageError) as refused:
        plan_profile([], [parse("x:1x2")])
    assert refused.value.need == "none: the model has no inputs"


def test_a_static_input_needs_no_shape() -> None:
    assert plan_profile([FIXED], []).ranges == ()
    assert plan_profile([FIXED], []).trtexec_flags() == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["ids:1x1"], "no input"),
        (["input_ids:1x1", "input_ids:2x2"], "twice"),
        (["input_ids:1x1x1"], "rank 2"),
        (["table:3x21"], "20 where the model fixes it"),
        (["input_ids:1x5", "attention_mask:1x7"], "seq = 5,5,5"),
    ],
)
def test_a_shape_that_contradicts_the_model_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_profile([IDS, MASK, FIXED], [parse(text) for text in given])
    assert words in str(caught.value)


def test_two_ranges_of_one_input_are_refused_with_both_and_the_way_out() -> None:
    with pytest.raises(UsageError, match="twice") as caught:
        plan_profile([IDS], [parse("input_ids:1x1"), parse("input_ids:1x1,4x64,8x512")])
    assert caught.value.got == "input_ids:1x1 and input_ids:1x1,4x64,8x512"
    assert "flash-trt build alone takes several" in caught.value.need


# --- dims that are expressions of others, as a cache's are ------------------------------------------------------------

CACHED = [IDS, GraphInput("mask", 7, ("batch", "seq + past")), GraphInput("key", 1, ("batch", 2, "past", 16))]


def test_a_sum_is_computed_from_its_parts_defaults() -> None:
    profile = plan_profile(CACHED, [])
    assert profile.ranges[1] == ShapeRange("mask", (1, 1), (1, 256), (8, 1024))
    assert profile.chosen == {"batch": (1, 1, 8), "seq": (1, 128, 512), "past": (0, 128, 512)}


def test_a_sum_is_computed_from_what_is_given_of_its_parts() -> None:
    profile = plan_profile(CACHED, [parse("input_ids:1x1,2x3,4x40"), parse("key:1x2x0x16,2x2x70x16,4x2x500x16")])
    assert profile.ranges[1] == ShapeRange("mask", (1, 1), (2, 73), (4, 540))
    assert profile.chosen == {}


def test_products_are_computed_too_and_their_parts_get_the_default_of_their_axis() -> None:
    profile = plan_profile([GraphInput("x", 1, ("4*rows", "2*width + 1"))], [])
    assert profile.ranges[0] == ShapeRange("x", (4, 3), (4, 257), (32, 1025))
    assert profile.chosen == {"rows": (1, 1, 8), "width": (1, 128, 512)}


def test_a_sum_given_may_have_bounds_of_its_own_but_not_another_usual_length() -> None:
    parts = [parse("input_ids:1x1,2x3,4x40"), parse("key:1x2x0x16,2x2x70x16,4x2x500x16")]
    profile = plan_profile(CACHED, [*parts, parse("mask:1x1,2x73,4x512")])
    assert profile.ranges[1].largest == (4, 512)
    with pytest.raises(UsageError, match=r"seq \+ past = 73 as the usual length, since past = 70, seq = 3"):
        plan_profile(CACHED, [*parts, parse("mask:1x1,2x74,4x512")])


@pytest.mark.parametrize(
    "dim",
    [
        "*".join("s" * 201),
        "999999999999999999*a*a*a",
        "seq + 999999999999999999",
        "2147483648*q",
        "*".join("s" * 249),
    ],
    ids=lambda dim: dim[:30],
)
def test_an_expression_that_is_no_length_is_refused(dim: str) -> None:
    with pytest.raises(UsageError, match="no length that a tensor can have") as caught:
        plan_profile([GraphInput("x", 1, ("batch", dim))], [])
    assert len(str(caught.value)) < 1000


def test_an_expression_of_endless_length_is_a_name() -> None:
    dim = "*".join(["s"] * 5000)
    profile = plan_profile([GraphInput("x", 1, (1, dim))], [parse("x:1x1,1x3,1x5")])
    assert profile.ranges[0].largest == (1, 5)


@pytest.mark.parametrize("dim", ["2147483647*a", "a*a*a"])
def test_the_largest_length_is_taken(dim: str) -> None:
    assert plan_profile([GraphInput("x", 1, (1, dim)), GraphInput("y", 1, ("a",))], [parse("y:1")]).ranges


def test_trtexec_flags_hold_every_dynamic_input() -> None:
    profile = plan_profile([IDS, MASK, FIXED], [parse("input_ids:1x1,4x64,8x200")])
    assert profile.trtexec_flags() == [
        "--minShapes=input_ids:1x1,attention_mask:1x1",
        "--optShapes=input_ids:4x64,attention_mask:4x64",
        "--maxShapes=input_ids:8x200,attention_mask:8x200",
    ]
    assert profile.provider_parameters() == {
        "trt_profile_min_shapes": "input_ids:1x1,attention_mask:1x1",
        "trt_profile_opt_shapes": "input_ids:4x64,attention_mask:4x64",
        "trt_profile_max_shapes": "input_ids:8x200,attention_mask:8x200",
    }


@pytest.mark.parametrize("text", ["ids:1x600", "ids:1x1,1x5,1x600"])
def test_a_shape_is_echoed_as_it_is_spelled(text: str) -> None:
    assert str(parse(text)) == text
