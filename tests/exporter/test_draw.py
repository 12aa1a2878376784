# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from flash_export import dim_texts, nudge
from flash_export.dims import Dim
from flash_export.draw import PADDINGS, _solved, draw_inputs, draw_mask, dynamic_dims, sizes_in, sizes_to_try
from flash_export.errors import UsageError
from flash_export.input_roles import read_roles

HEAD = '<ir_version: 9, opset_import: ["": 18]>'


def model(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(HEAD + text))


BERT_LIKE = model(
    """
    g (int64[b,s] ids, int64[b,s] types, int64[b,s] attention, float[b,s,4] x) => (float[b,s,4] y)
    <float[11,4] words, float[2,4] kinds, float one = {1.0}, float big = {-10000.0}>
    {
      e = Gather(words, ids)
      t32 = Cast<to = 6>(types)
      t = Gather(kinds, t32)
      m = Cast<to = 1>(attention)
      inverted = Sub(one, m)
      bias = Mul(inverted, big)
      axis = Constant<value_ints = [2]>()
      bias3 = Unsqueeze(bias, axis)
      et = Add(e, t)
      ex = Add(et, x)
      y = Add(ex, bias3)
    }"""
)


def test_roles_are_read_from_where_an_input_flows_and_not_from_its_name() -> None:
    roles = read_roles(BERT_LIKE)
    assert (roles["ids"].kind, roles["ids"].limit) == ("index", 11)
    assert (roles["types"].kind, roles["types"].limit) == ("index", 2)
    assert roles["attention"].kind == "mask"
    assert roles["x"].kind == "number"


def test_indices_stay_below_their_table_and_reach_its_last_row() -> None:
    drawn = draw_inputs(BERT_LIKE, {"b": 5, "s": 301})
    assert drawn["ids"].dtype == np.int64
    assert (drawn["ids"].min(), drawn["ids"].max()) == (0, 10)
    assert (drawn["types"].min(), drawn["types"].max()) == (0, 1)


def test_an_offset_before_the_table_lowers_the_limit() -> None:
    shifted = model(
        """
        g (int64[b,s] positions) => (float[b,s,4] y) <float[11,4] table, int64 two = {2}>
        { p = Add(positions, two)  y = Gather(table, p) }"""
    )
    assert read_roles(shifted)["positions"].limit == 9


def test_the_smallest_of_several_tables_counts() -> None:
    two = model(
        """
        g (int64[b] i) => (float[b,4] y, float[b,4] z) <float[11,4] wide, float[7,4] narrow>
        { y = Gather(wide, i)  z = Gather(narrow, i) }"""
    )
    assert read_roles(two)["i"].limit == 7


def test_token_ids_that_are_also_compared_with_the_padding_id_stay_indices() -> None:
    both = model(
        """
        g (int64[b,s] ids) => (float[b,s,4] y, bool[b,s] m) <float[11,4] words, int64 pad = {0}>
        { y = Gather(words, ids)  m = Equal(ids, pad) }"""
    )
    assert read_roles(both)["ids"].kind == "index"


def test_tables_inside_local_functions_are_found() -> None:
    text = """
    g (int64[b,s] ids) => (float[b,s,4] y) <float[11,4] words> { y = custom.Embed(words, ids) }
    <domain: "custom", opset_import: ["": 18]> Embed (w, i) => (o) { o = Gather(w, i) }"""
    local = ir.from_proto(onnx.parser.parse_model('<ir_version: 9, opset_import: ["": 18, "custom": 1]>' + text))
    assert read_roles(local)["ids"].limit == 11


def test_a_float_that_is_summed_is_no_mask_and_one_minus_a_float_is() -> None:
    floats = model(
        """
        g (float[b,s] x, float[b,s] keep) => (float[b,s] y, float s0) <float one = {1.0}>
        { s0 = ReduceSum<keepdims = 0>(x)  y = Sub(one, keep) }"""
    )
    roles = read_roles(floats)
    assert (roles["x"].kind, roles["keep"].kind) == ("number", "mask")
    assert set(np.unique(draw_inputs(floats, {"b": 4, "s": 33})["keep"])) == {0.0, 1.0}


@pytest.mark.parametrize("kind", PADDINGS)
@pytest.mark.parametrize("shape", [(4, 37), (4, 1, 1, 37), (4, 1, 5, 37), (3, 37, 37), (1, 1), (37,)])
def test_no_row_of_a_mask_is_empty_and_its_kind_is_what_was_asked(kind: str, shape: tuple[int, ...]) -> None:
    mask = draw_mask(np.random.default_rng(3), shape, kind)
    assert mask.any(axis=-1).all()
    keys = np.diff(mask.astype(int), axis=-1)
    if kind == "full":
        assert mask.all()
    if kind == "right":
        assert (keys <= 0).all()
    if kind == "left":
        assert (keys >= 0).all()
    if kind == "mixed" and shape[0] == 4:
        assert mask[3].all()
    if kind == "holes" and shape[-1] > 1:
        assert not mask.all()


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 1, 37, 1), 2), ((3, 37, 1), 1), ((2, 4, 1, 1), 1), ((3, 5, 37, 1), 2)]
)
def test_a_mask_of_queries_or_heads_is_drawn_along_them(shape: tuple[int, ...], axis: int) -> None:
    """Its last axis stands for the keys, and has length 1."""
    mask = draw_mask(np.random.default_rng(3), shape)
    assert mask.shape == shape
    assert mask.any(axis=axis).all()
    assert (np.diff(mask.astype(int), axis=axis) != 0).any()
    assert (np.diff(mask.astype(int), axis=0) != 0).any()


def test_an_empty_mask_stays_empty() -> None:
    assert draw_mask(np.random.default_rng(0), (2, 0)).shape == (2, 0)


def test_mixed_padding_shows_right_left_and_holes_in_one_batch() -> None:
    mask = draw_mask(np.random.default_rng(11), (4, 61))
    steps = np.diff(mask.astype(int), axis=-1)
    assert (steps[0] <= 0).all()
    assert (steps[1] >= 0).all()
    assert (steps[2] > 0).any()
    assert (steps[2] < 0).any()
    assert mask[3].all()


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_some_mask_of_three_runs_differs_along_each_axis(batch: int) -> None:
    """Attention along columns sees masks along an axis that padding fills evenly."""
    masks = [draw_mask(np.random.default_rng(seed), (batch, 11, 13), turn=seed) for seed in range(3)]
    for axis in (-1, -2):
        assert any((np.diff(mask.astype(int), axis=axis) != 0).any() for mask in masks)


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    first, again, other = (draw_inputs(BERT_LIKE, {"b": 2, "s": 9}, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(first[n], again[n]) for n in first)
    assert not np.array_equal(first["x"], other["x"])


def test_dims_are_named_batches_told_from_lengths_and_sums_taken_apart() -> None:
    dims = model(
        """
        g (float[b,past,4] cache, float[b,new,4] x, bool[b,1,new,"past + new"] m, float[?,3] loose)
        => (float[b,new,4] y) { y = Identity(x) }"""
    )
    assert dynamic_dims(dims) == {"b": True, "past": False, "new": False, "loose.0": True}
    drawn = draw_inputs(dims, {"b": 2, "past": 5, "new": 3, "loose.0": 7})
    assert drawn["m"].shape == (2, 1, 3, 8)
    assert drawn["loose"].shape == (7, 3)


LENGTHS = model("g (float[b,q,4] x, float[b,k,4] y, float[b,v,4] z) => (float[b,q,4] o) { o = Identity(x) }")


def test_settings_are_odd_unequal_past_a_tile_and_inside_their_ranges() -> None:
    settings = [choices[0] for choices in sizes_to_try(LENGTHS, {"k": (2, 100)})]
    assert len(settings) == 3
    assert all(s["q"] % 2 and len({s["q"], s["k"], s["v"]}) == 3 for s in settings)
    assert any(s["q"] == 1 for s in settings)
    assert any(s["q"] > 128 for s in settings)
    assert all(2 <= s["k"] <= 100 for s in settings)
    assert len({s["b"] for s in settings}) == 3


def test_lengths_that_are_alike_in_the_example_are_tried_alike_and_then_all_are() -> None:
    example = {"x": np.zeros((2, 5, 4)), "y": np.zeros((2, 9, 4)), "z": np.zeros((2, 9, 4))}
    for different, grouped, alike, *_ in sizes_to_try(LENGTHS, {}, example):
        assert len({different["q"], different["k"], different["v"]}) == 3
        assert grouped["k"] == grouped["v"] != grouped["q"]
        assert len({alike["q"], alike["k"], alike["v"]}) == 1


def test_a_total_is_first_the_sum_of_its_past_and_what_is_new() -> None:
    cached = model(
        """g (int64[b,sequence_length] i, int64[b,total_sequence_length] m, float[b,2,past_sequence_length,4] k)
        => (int64[b,sequence_length] o) { o = Identity(i) }"""
    )
    for first, second, *_ in sizes_to_try(cached, {}):
        past, new = first["past_sequence_length"], first["sequence_length"]
        assert first["total_sequence_length"] == past + new
        assert second == first | {"total_sequence_length": second["total_sequence_length"]} != first
    (only, *_), *_ = sizes_to_try(LENGTHS, {})
    assert len(set(only.values())) == 4


def test_short_choices_for_a_small_table_of_positions_come_before_a_batch_of_one() -> None:
    for choices in sizes_to_try(LENGTHS, {}):
        half = [c for c in choices if c["b"] == choices[0]["b"]]
        assert choices[: len(half)] == half
        assert all(half[-1][n] < 20 and half[-1][n] % 2 for n in "qkv")


def test_the_last_choices_are_the_same_lengths_with_a_batch_of_one() -> None:
    for choices in sizes_to_try(LENGTHS, {}):
        lengths = [{n: c[n] for n in "qkv"} for c in choices]
        last = [{n: c[n] for n in "qkv"} for c in choices if c["b"] == 1]
        assert last == lengths[-len(last) :] == lengths[: len(last)]
    assert all(c["b"] == 2 for choices in sizes_to_try(LENGTHS, {"b": (2, 2)}) for c in choices)


def test_a_static_model_has_one_setting() -> None:
    assert sizes_to_try(model("g (float[2,3] x) => (float[2,3] y) { y = Identity(x) }"), {}) == [[{}]]


@pytest.mark.parametrize("dim", ["²", "1" * 5000, "+".join(["s"] * 4000), "(" * 300 + "s" + ")" * 300, "s**2", "a b"])
def test_a_dim_that_is_no_short_expression_is_a_name(dim: str) -> None:
    odd = model("g (float[s] x) => (float[s] y) { y = Identity(x) }")
    odd.graph.inputs[0].shape = ir.Shape([dim])
    assert dynamic_dims(odd) == {dim: True}
    assert draw_inputs(odd, {dim: 3})["x"].shape == (3,)
    assert Dim.named(dim).evaluate(dict.fromkeys(Dim.named(dim).symbols, 3)) > 0


def test_a_dim_divided_by_0_has_no_size() -> None:
    odd = model("g (float[s] x) => (float[s] y) { y = Identity(x) }")
    odd.graph.inputs[0].shape = ir.Shape(["s // (s - s)"])
    with pytest.raises(UsageError, match="has no size"):
        draw_inputs(odd, {"s": 3})


def test_a_missing_size_names_the_input_the_axis_and_the_dim() -> None:
    with pytest.raises(UsageError, match=r"(?s)input ids, axis 1.*size for s"):
        draw_inputs(BERT_LIKE, {"b": 2})


def test_inputs_with_a_default_value_are_left_alone() -> None:
    defaulted = model("g (float[2] x, float[2] w = {1, 2}) => (float[2] y) { y = Add(x, w) }")
    assert set(draw_inputs(defaulted, {})) == {"x"}


def test_half_precision_bytes_and_truths_come_in_their_own_dtype() -> None:
    kinds = model(
        """
        g (bfloat16[3] a, float16[3] h, uint8[300] u, bool[3] t) => (bfloat16[3] y) { y = Identity(a) }"""
    )
    drawn = draw_inputs(kinds, {})
    assert drawn["a"].dtype == ml_dtypes.bfloat16
    assert drawn["h"].dtype == np.float16
    assert drawn["t"].dtype == np.bool_
    assert drawn["u"].max() > 200


@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16", "double", "int64", "int32", "uint8", "bool"])
def test_an_input_of_rank_0_is_an_array_too(dtype: str) -> None:
    drawn = draw_inputs(model(f"g ({dtype} s) => ({dtype} y) {{ y = Identity(s) }}"), {})
    assert (type(drawn["s"]), drawn["s"].shape) == (np.ndarray, ())
    assert type(nudge.feeds(drawn, ["s"], 1)["s"]) is np.ndarray


def test_a_text_input_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="--values"):
        draw_inputs(model("g (string[3] s) => (string[3] y) { y = Identity(s) }"), {})


def test_a_path_is_read(tmp_path: Path) -> None:
    ir.save(BERT_LIKE, tmp_path / "m.onnx")
    assert draw_inputs(tmp_path / "m.onnx", {"b": 1, "s": 3})["x"].shape == (1, 3, 4)


def test_a_negative_dim_is_a_dynamic_one_without_a_name() -> None:
    """As older exporters of PyTorch and TensorFlow write it."""
    given = model("g (float[1] x, float[7, 3] z) => (float[1] y) { y = Identity(x) }")
    given.graph.inputs[1].shape = ir.Shape([-1, 3])
    assert dynamic_dims(given) == {"z.0": True}
    assert draw_inputs(given, {"z.0": 5})["z"].shape == (5, 3)
    with pytest.raises(UsageError, match="has no size"):
        draw_inputs(given, {})


@pytest.mark.parametrize("dims", ["2147483647, 2147483647"])
def test_a_shape_of_which_no_numbers_can_be_drawn_is_a_usage_error(dims: str) -> None:
    given = model(f"g (float[1] x, float[{dims}] z) => (float[1] y) {{ y = Identity(x) }}")
    given.graph.inputs[1].shape = ir.Shape([int(dim) for dim in dims.split(",")])
    with pytest.raises(UsageError) as error:
        draw_inputs(given, {})
    assert error.value.where == "input z"
    assert error.value.got == f"shape [{dims}]"


@pytest.mark.parametrize("kind", [ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.FLOAT8E4M3FN, ir.DataType.COMPLEX64])
def test_an_input_of_a_type_that_no_array_here_has_is_refused(kind: ir.DataType) -> None:
    typed = model("g (float[3] x) => (float[3] y) { y = Identity(x) }")
    typed.graph.inputs[0].type = ir.TensorType(kind)
    with pytest.raises(UsageError, match=f"type {kind.name}"):
        draw_inputs(typed, {})


def test_an_input_of_more_axes_than_an_array_has_is_refused() -> None:
    deep = model("g (float[3] x) => (float[3] y) { y = Identity(x) }")
    deep.graph.inputs[0].shape = ir.Shape([1] * 65)
    with pytest.raises(UsageError, match="along at most 64 axes"):
        draw_inputs(deep, {})


def test_a_dim_that_only_a_multiple_of_is_had_has_its_size_in_the_example() -> None:
    computed = model("g (float[b,x,y,z] t, float[p] past) => (float[b,x,y,z] u) { u = Identity(t) }")
    computed.graph.inputs[0].shape = ir.Shape(["b", "4*blocks + 1", "p + new", "2*odd"])
    shape = {"t": np.zeros((3, 9, 7, 5), np.float32), "past": np.zeros(5, np.float32)}
    sizes = sizes_in(computed, shape)
    assert {name: n for name, n in sizes.items() if name.isidentifier()} == {"b": 3, "p": 5, "blocks": 2, "new": 2}


def test_boxes_have_their_corners_in_order_below_their_table() -> None:
    page = model(
        """
        g (int64[b,s,4] bbox, float16[b,4] other_bbox) => (float[b,s,4,3] y, float16[b,4] same)
        <float[64,3] places> { y = Gather(places, bbox)  same = Identity(other_bbox) }"""
    )
    for kind in PADDINGS:
        drawn = draw_inputs(page, {"b": 3, "s": 101}, kind=kind)
        for name, highest in (("bbox", 63), ("other_bbox", 1)):
            left, top, right, bottom = np.moveaxis(drawn[name], -1, 0)
            assert ((left >= 0) & (left <= right) & (right <= highest)).all()
            assert ((top >= 0) & (top <= bottom) & (bottom <= highest)).all()
        assert drawn["bbox"].max() > 50
        assert drawn["other_bbox"].dtype == np.float16


def test_a_quotient_of_a_dimension_is_not_solved_for_it() -> None:
    """It has no size at 0, by which one that grows evenly with its dimension is solved."""
    assert _solved("64//n", "n", 8, {}) == {}
    assert _solved("4*n", "n", 8, {}) == {"n": 2}


def test_a_word_with_a_hyphen_is_a_name_and_a_minus_between_spaces_is_none() -> None:
    assert dim_texts.names_in("seq-len") == ["seq-len"]
    assert set(dim_texts.names_in("2*seq - len")) == {"seq", "len"}
    assert dim_texts.length_at("seq-len", {"seq-len": 7}) == 7
    assert dim_texts.length_at("2*n - 1", {"n": 4}) == 7
