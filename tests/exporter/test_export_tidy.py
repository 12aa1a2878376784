# SPDX-License-Identifier: Apache-2.0
"""Tidying names things, and never changes what a graph computes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.traversal
import pytest

from flash_export import export_tidy


def value(name: str, *shape: str | int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def node(op_type: str, inputs: list[ir.Value], output: str, scopes: list[str] | None = None) -> ir.Node:
    result = ir.Node("", op_type, inputs, outputs=[value(output, "s0", 3)], version=18)
    if scopes is not None:
        result.metadata_props[export_tidy.SCOPES] = repr(scopes)
    return result


def model(inputs: list[ir.Value], nodes: list[ir.Node], outputs: list[ir.Value]) -> ir.Model:
    return ir.Model(ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 18}), ir_version=10)


def test_nodes_are_named_after_their_modules() -> None:
    x = value("x", "s0", 3)
    scopes = ["", "encoder", "encoder.layer.0", "encoder.layer.0.act", "relu"]
    first = node("Relu", [x], "a", scopes)
    second = node("Relu", [first.outputs[0]], "b", scopes)
    bare = node("Relu", [second.outputs[0]], "c", ["", "_empty_nn_module_stack_from_metadata_hook", "relu_2"])
    export_tidy.name_nodes(model([x], [first, second, bare], [bare.outputs[0]]).graph)
    assert [first.name, second.name, bare.name] == ["/encoder/layer.0/act/Relu", "/encoder/layer.0/act/Relu_1", "/Relu"]


def test_a_value_that_bears_a_wanted_name_makes_room() -> None:
    x = value("in0", "s0", 3)
    inner = node("Relu", [x], "output")
    outer = node("Neg", [inner.outputs[0]], "neg")
    graph = model([x], [inner, outer], [outer.outputs[0]]).graph
    export_tidy.name_boundary(graph, ["x"], ["output"])
    assert [v.name for v in (x, inner.outputs[0], outer.outputs[0])] == ["x", "output_inner0", "output"]


def test_an_output_named_like_an_input_gets_a_name_of_its_own() -> None:
    x = value("x", "s0", 3)
    relu = node("Relu", [x], "r")
    export_tidy.name_boundary(model([x], [relu], [relu.outputs[0]]).graph, ["x"], ["x"])
    assert (x.name, relu.outputs[0].name) == ("x", "x_")


def test_dimensions_are_renamed_everywhere_also_inside_expressions() -> None:
    x = value("x", "s0", 3)
    relu = node("Relu", [x], "r")
    relu.outputs[0].shape = ir.Shape(["2*s0 + s01", 3])
    tidied = model([x], [relu], [relu.outputs[0]])
    assert export_tidy.name_dims(tidied, {"s0": ("batch", 1, 9)}) == {"batch": (1, 9)}
    assert [str(d) for d in x.shape or ()] == ["batch", "3"]
    assert [str(d) for d in relu.outputs[0].shape] == ["2*batch + s01", "3"]


def test_an_output_that_is_an_input_or_twice_the_same_gets_a_node() -> None:
    x = value("x", "s0", 3)
    relu = node("Relu", [x], "r")
    tidied = model([x], [relu], [x, relu.outputs[0], relu.outputs[0]])
    export_tidy.tidy(tidied, ["x"], ["same", "a", "b"])
    assert [v.name for v in tidied.graph.outputs] == ["same", "a", "b"]
    assert len({id(v) for v in [*tidied.graph.inputs, *tidied.graph.outputs]}) == 4


@pytest.mark.parametrize(("opset", "least"), [(18, 9), (20, 9), (21, 10), (23, 11)])
def test_the_ir_version_is_the_least_that_old_runtimes_need(opset: int, least: int) -> None:
    x = value("x", "s0", 3)
    tidied = model([x], [relu := node("Relu", [x], "r")], [relu.outputs[0]])
    tidied.opset_imports[""] = opset
    export_tidy.tidy(tidied, ["x"], ["y"])
    assert tidied.ir_version == least


def test_notes_of_the_exporting_machine_are_gone_and_dead_nodes_too() -> None:
    x = value("x", "s0", 3)
    relu = node("Relu", [x], "r", ["", "relu"])
    relu.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/somewhere/model.py"'
    dead = node("Neg", [x], "dead")
    tidied = model([x], [relu, dead], [relu.outputs[0]])
    export_tidy.tidy(tidied, ["x"], ["y"])
    assert [n.op_type for n in tidied.graph] == ["Relu"]
    assert b"somewhere" not in ir.to_proto(tidied).SerializeToString()


def test_constants_are_folded_and_equal_nodes_merged() -> None:
    x = value("x", "s0", 3)
    two = ir.Value(name="two", const_value=ir.tensor(np.float32([2.0]), name="two"))
    square = ir.Node("", "Mul", [two, two], outputs=[ir.Value(name="four")], version=18)
    left = ir.Node("", "Mul", [x, square.outputs[0]], outputs=[value("left", "s0", 3)], version=18)
    right = ir.Node("", "Mul", [x, square.outputs[0]], outputs=[value("right", "s0", 3)], version=18)
    total = ir.Node("", "Add", [left.outputs[0], right.outputs[0]], outputs=[value("sum", "s0", 3)], version=18)
    tidied = model([x], [square, left, right, total], [total.outputs[0]])
    tidied.graph.initializers["two"] = two
    export_tidy.tidy(tidied, ["x"], ["y"])
    assert [n.op_type for n in tidied.graph] == ["Mul", "Add"]
