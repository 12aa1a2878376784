# SPDX-License-Identifier: Apache-2.0
"""Dims are polynomials: equal when they are, divided when that is exact, and never guessed."""

from __future__ import annotations

import onnx.defs
import onnx.parser
import onnx_ir as ir
import pytest
from exporter.graphs import model

from flash_export.dims import Dim
from flash_export.shape_rules import SHAPE_RULES
from flash_export.shapes import Shapes

B, S = Dim.named("B"), Dim.named("S")


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        ("4*B", Dim.of(4) * B),
        ("B*S", B * S),
        ("S + 1", S + Dim.of(1)),
        ("2*B*S", Dim.of(2) * B * S),
        ("S+B", B + S),
    ],
)
def test_a_dim_param_that_is_a_formula_is_read_as_one(text: str, dim: Dim) -> None:
    assert Dim.named(text) == dim


@pytest.mark.parametrize(
    "text", ["S - 1", "(S+1)*B", "S//2", "floor(S/2)", "a b", "Max(1, S)", "2", "2*2", "a+b+c+d+e+f+g+h+i"]
)
def test_a_dim_param_of_another_form_is_one_opaque_name(text: str) -> None:
    assert Dim.named(text).symbols == {text}


def test_division_is_exact_or_not_at_all() -> None:
    assert (Dim.of(12) * B).divided(Dim.of(4)) == Dim.of(3) * B
    assert (Dim.of(12) * B).divided(B) == Dim.of(12)
    assert (B + S).divided(B + S) == Dim.of(1)
    assert (Dim.of(4) * (B + S)).divided(B + S) == Dim.of(4)
    assert Dim.of(7).divided(Dim.of(2)) is None
    assert B.divided(S) is None
    assert (B + S).divided(B) is None


def shapes(body: str, inputs: str, outputs: str, constants: str) -> dict[str, str]:
    converted = ir.from_proto(model(body, inputs=inputs, outputs=outputs, constants=constants))
    known = Shapes(converted.graph)
    return {str(v.name): str(known.shape(v)) for n in converted.graph for v in n.outputs}


def test_reshape_targets_computed_in_the_graph_are_known() -> None:
    found = shapes(
        "s = Shape (x)\n b = Gather (s, i0)\n bh = Mul (b, four)\n u = Unsqueeze (bh, ax)\n"
        "t = Concat <axis = 0> (u, rest)\n y = Reshape (x, t)\n",
        "float[B, 4, S, 8] x",
        "float[N, S, 8] y",
        "int64 i0 = {0}, int64 four = {4}, int64[1] ax = {0}, int64[2] rest = {-1, 8}",
    )
    assert found["y"] == "(4*B, S, 8)"


def test_a_concat_has_the_rank_of_any_input_that_is_known() -> None:
    """A branch of the legacy exporter may have either of two ranks, and what joins it tells which."""
    branches = "then_branch = one () => (a) { a = Identity (x) }, else_branch = other () => (b) { b = Squeeze (x) }"
    found = shapes(
        f"u = If <{branches}> (c)\n y = Concat <axis = 1> (x, u)\n",
        "float[B, 3] x, bool c",
        "float[B, N] y",
        "int64 unused = {0}",
    )
    assert (found["u"], found["y"]) == ("None", "(B, N)")


def test_gathered_elements_have_the_shape_of_their_indices_and_tiles_that_of_their_repeats() -> None:
    found = shapes(
        "g = GatherElements <axis = 1> (x, i)\n y = Tile (g, repeats)\n",
        "float[B, S] x, int64[B, 3] i",
        "float[B, 6] y",
        "int64[2] repeats = {1, 2}",
    )
    assert (found["g"], found["y"]) == ("(B, 3)", "(B, 6)")


@pytest.mark.parametrize(("axis", "shape"), [(1, "(B, 4*S)"), (-1, "(B*S, 4)"), (0, "(1, 4*B*S)"), (3, "(4*B*S, 1)")])
def test_a_flattened_tensor_has_two_axes(axis: int, shape: str) -> None:
    known = shapes(f"y = Flatten <axis = {axis}> (x)\n", "float[B, S, 4] x", "float[M, N] y", "int64 unused = {0}")
    assert known["y"] == shape


@pytest.mark.parametrize(
    ("start", "end", "length"),
    [
        (0, 1, "1"),
        (2, 3, "1"),
        (-1, 2**31 - 1, "1"),
        (-1, 2**63 - 1, "1"),
        (-3, -2, "1"),
        (0, 2**63 - 1, "4 + S"),
        (0, 4, "4"),
        (1, 4, "3"),
        (-4, -1, "3"),
        (-3, 2**63 - 1, "3"),
        (0, 5, "N"),
        (-5, 2**63 - 1, "N"),
        (-1, 0, "N"),
        (-2, 1, "N"),
        (0, -1, "N"),
        (2, 1, "N"),
    ],
)
def test_a_slice_of_a_dynamic_length_has_a_length_where_every_one_has_it(start: int, end: int, length: str) -> None:
    found = shapes(
        "c = Concat <axis = 1> (x, more)\n y = Slice (c, from, to, ax)\n",
        "float[B, S] x, float[B, 4] more",
        "float[B, N] y",
        f"int64[1] from = {{{start}}}, int64[1] to = {{{end}}}, int64[1] ax = {{1}}",
    )
    assert found["y"] == f"(B, {length})"


def test_a_slice_of_an_old_opset_keeps_its_bounds_in_attributes() -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 9]>
        main (float[B, S] x) => (float[M, N] y) { y = Slice <axes = [0], starts = [0], ends = [1]> (x) }
    """
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    assert str(Shapes(graph).shape(graph.outputs[0])) == "(1, S)"


def test_two_names_that_met_in_a_product_are_one_length() -> None:
    known = Shapes(ir.from_proto(model("y = Relu (x)\n", inputs="float[B] x", outputs="float[B] y")).graph)
    known.unify(B, S)
    assert known.normal(B * Dim.of(2)) == known.normal(S * Dim.of(2))


OTHER_TYPES = sorted(
    schema.name
    for schema in onnx.defs.get_all_schemas()
    if schema.domain == ""
    and schema.inputs
    and schema.outputs
    and schema.inputs[0].type_str != schema.outputs[0].type_str
    and schema.name not in SHAPE_RULES
)


@pytest.mark.parametrize("operator", OTHER_TYPES)
def test_no_operator_is_given_a_type_that_it_cannot_make(operator: str) -> None:
    schema = onnx.defs.get_schema(operator)
    inputs = [ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT)) for i in range(max(1, schema.min_input))]
    node = ir.node(operator, inputs)
    dtype = Shapes(ir.Graph(inputs, node.outputs, nodes=[node])).dtype(node.outputs[0])
    assert dtype is None or f"tensor({dtype.name.lower()})" in schema.outputs[0].types
