# SPDX-License-Identifier: Apache-2.0
"""An input that counts keys is drawn as a length, and a scale that is off shows on what is drawn for it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.patterns import test_contrib as contrib
from exporter.patterns import test_contrib_cache as cached
from exporter.test_lengths import AXES, INPUTS, MASKS, WIDE, graph

from flash_export import input_roles, pipeline
from flash_export.draw import draw_inputs
from flash_export.input_roles import read_roles
from flash_export.options import Options
from flash_export.talk import Talk

SIZES = {"B": 40, "S": 3, "T": 67, "P": 11}


def drawn(proto: onnx.ModelProto, name: str, kind: str = "mixed", sizes: dict[str, int] = SIZES) -> np.ndarray:
    model = ir.from_proto(proto)
    assert read_roles(model)[name].kind == "length"
    return draw_inputs(model, sizes, kind=kind)[name]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["shown_before", "narrow_lengths", "other_way_round"])
def test_a_length_ends_at_a_key_that_is_there(name: str) -> None:
    lengths = drawn(graph(MASKS[name]), "n")
    assert (lengths.min() >= 1, lengths.max()) == (True, 67)
    assert len(np.unique(lengths)) > 10
    assert (drawn(graph(MASKS[name]), "n", "full") == 67).all()


CONSTANT_POSITIONS = "at = Slice (table, ax0, ends, ax0)\n m = Less (at, many)\n wide = Unsqueeze (m, heads)\n"


def constant_positions(length: str = "T") -> onnx.ModelProto:
    """Positions that an exporter has folded into a table, cut to the length of the keys, or as long as them."""
    numbers = ", ".join(map(str, range(67)))
    body = CONSTANT_POSITIONS if length == "T" else "m = Less (table, many)\n wide = Unsqueeze (m, heads)\n"
    return graphs.model(
        graphs.LENGTHS
        + "columns1 = Unsqueeze (columns, ax0)\n"
        + graphs.PRODUCT
        + WIDE
        + body.replace("ends", "columns1")
        + "masked = Where (wide, scaled, hidden)\n"
        + graphs.REST,
        inputs=INPUTS.replace("T", length),
        constants=f"{AXES}, int64[67] table = {{{numbers}}}",
    )


@pytest.mark.parametrize("length", ["T", "67"])
def test_positions_may_be_a_constant(length: str) -> None:
    lengths = drawn(constant_positions(length), "n")
    assert lengths.min() >= 1
    assert 30 < lengths.max() <= 67
    table = ir.from_proto(constant_positions(length))
    mixed = np.array([3, *range(66)], np.int64)
    table.graph.initializers["table"].const_value = ir.tensor(mixed)
    assert read_roles(table)["n"].kind == "mask"  # in no order, it is a comparison like any other


def standard(attributes: str = "") -> onnx.ModelProto:
    call = f"out = Attention {attributes} (q, k, v, , , , lengths)\n"
    return graphs.model(call, inputs=graphs.QKV + ", int64[B] lengths", opset=24)


def test_the_lengths_of_the_standard_operator_end_at_its_keys() -> None:
    lengths = drawn(standard(), "lengths")
    assert (lengths.min() >= 1, lengths.max()) == (True, 67)


def test_the_lengths_of_our_own_node_do_too() -> None:
    fused, _ = graphs.fuse(standard())
    lengths = drawn(fused, "lengths")
    assert (lengths.min() >= 1, lengths.max()) == (True, 67)


def test_a_mask_of_one_number_a_batch_entry_is_lengths_and_one_of_each_key_is_a_mask() -> None:
    lengths = drawn(contrib.MULTIHEAD["lengths"][0], "m")
    assert (lengths.min() >= 1, lengths.max()) == (True, 67)
    for proto in (contrib.MULTIHEAD["padding"][0], contrib.PACKED_WEIGHTS["padding"][0]):
        assert read_roles(ir.from_proto(proto))["m"].kind == "mask"


def test_a_cache_holds_the_new_keys_and_at_most_its_past_before_them() -> None:
    last, total = (drawn(cached.grouped(), name) for name in ("last", "total"))
    assert total == 3 + 11
    assert (last.min() >= 3 - 1, last.max()) == (True, 3 + 11 - 1)
    assert len(np.unique(last)) > 5


def test_a_cache_in_one_buffer_ends_with_it() -> None:
    proto = cached.grouped()
    for value in proto.graph.output[1:]:
        value.type.tensor_type.shape.dim[2].dim_param = "P"
    assert drawn(proto, "total") == 11
    assert drawn(proto, "last").max() == 11 - 1


def test_without_a_past_the_total_is_the_new_keys() -> None:
    proto = contrib.GROUPED["plain"][0]
    assert drawn(proto, "total") == 3
    assert (drawn(proto, "last") == 2).all()  # fewer would leave rows unspecified


@pytest.mark.parametrize(("by", "least", "most"), [("Sub", 2, 68), ("Add", 0, 66)])
def test_a_shift_on_the_way_is_taken_back(by: str, least: int, most: int) -> None:
    proto = graphs.model(
        graphs.LENGTHS
        + graphs.PRODUCT
        + f"one_less = {by} (n, i1)\n wide_n = Unsqueeze (one_less, ax1)\n"
        + MASKS["shown_before"].replace("many", "wide_n")
        + "\n"
        + graphs.REST,
        inputs=INPUTS,
        constants=AXES,
    )
    lengths = drawn(proto, "n")
    assert (lengths.min() >= least, lengths.max()) == (True, most)
    assert drawn(proto, "n", sizes=SIZES | {"T": 0}).min() >= 0


PROVEN = {
    "compared": graph(MASKS["shown_before"]),
    "constant": constant_positions(),
    "standard": standard(),
    "standard_causal": standard("<is_causal = 1>"),
    "multihead": contrib.MULTIHEAD["lengths"][0],
    "multihead_mask": contrib.MULTIHEAD["padding"][0],
    "grouped": contrib.GROUPED["plain"][0],
    "grouped_cache": cached.grouped(),
    "grouped_rotary": cached.grouped(
        "do_rotary = 1", ", c, s, at", ", float[400, 8] c, float[400, 8] s, int64[B, S] at"
    ),
    "grouped_valid": cached.grouped(more=", , , , , , , , , , valid", inputs=", int32[B] valid"),
}


def outcome(proto: onnx.ModelProto, folder: Path) -> pipeline.Result:
    onnx.save(proto, folder / "in.onnx")
    return pipeline.run(Options(source=folder / "in.onnx", output=folder / "out.onnx"), Talk(quiet=True))


@pytest.mark.parametrize("name", PROVEN)
def test_an_attention_with_lengths_is_proven_without_values(name: str, tmp_path: Path) -> None:
    result = outcome(PROVEN[name], tmp_path)
    assert [s.status for s in result.sites] == ["fused"], result.sites[0].reason
    runs = [run for run in result.report["check"]["runs"] if run["kind"] == "site"]  # type: ignore[index]
    assert len(runs) >= 2


def test_lengths_that_are_all_0_prove_nothing(tmp_path: Path) -> None:
    """What became of them before they were told from indices."""
    with mock.patch.object(input_roles, "span_of", return_value=None):
        (site,) = outcome(standard(), tmp_path).sites
    assert site.reason is not None
    assert site.reason.code == "not_proven"
    assert read_roles(ir.from_proto(standard()))["lengths"].kind == "length"


def test_a_batch_goes_on_by_one_step(tmp_path: Path) -> None:
    """GroupQueryAttention takes more than one new token of a single sequence alone."""
    names = {"S": "sequence_length", "P": "past_sequence_length"}
    proto = cached.grouped()
    for value in [*proto.graph.input, *proto.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]
    result = outcome(proto, tmp_path)
    settings = {str(run["setting"]) for run in result.report["check"]["runs"]}  # type: ignore[index]
    assert "B=3 sequence_length=1 past_sequence_length=41 seed=3" in settings
    assert not result.report["check"]["warnings"]  # type: ignore[index]


@pytest.mark.parametrize("operator", ["Less", "Add", "Sub", "OneHot", "Cast", "Range", "Where"])
def test_an_operator_of_another_domain_says_nothing_by_its_name(operator: str) -> None:
    """It has other operands than the standard's: what stands beside the input may not be there."""
    node = onnx.helper.make_node(operator, ["n"], ["out"], domain="other")
    inputs = [onnx.helper.make_tensor_value_info("n", onnx.TensorProto.INT64, ["B"])]
    outputs = [onnx.helper.make_tensor_value_info("out", onnx.TensorProto.INT64, ["B"])]
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("other", 1)]
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets)
    role = read_roles(ir.from_proto(proto))["n"]
    assert (role.kind, role.limit, role.spans) == ("index", None, ())


def test_positions_from_a_node_without_inputs_are_no_positions() -> None:
    body = "p = other.Cast ()\n out = Less (n, p)\n"
    text = f'<ir_version: 9, opset_import: ["" : 18, "other" : 1]>\nmain (int64[B] n) => (bool[B] out)\n{{\n{body}}}\n'
    assert read_roles(ir.from_proto(onnx.parser.parse_model(text)))["n"].kind == "mask"
