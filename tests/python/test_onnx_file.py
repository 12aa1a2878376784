# SPDX-License-Identifier: Apache-2.0
"""An ONNX file is read without its weights, and every FlashAttention node in it is counted as TensorRT meets it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from python.attention_models import HEAD_DIM, HEADS, flash_node, fused

from flash_export.errors import UnsafeInput, UnsupportedModel, UsageError
from flash_export.op import DOMAIN
from flash_trt import onnx_file
from flash_trt.onnx_file import read

SHAPE = ["batch", HEADS, "seq", HEAD_DIM]
OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("mine", 1)]


def _save(path: Path, nodes: list[onnx.NodeProto], functions: list[onnx.FunctionProto] = []) -> Path:  # noqa: B006
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in ("query", "key", "value")]
    inputs.append(helper.make_tensor_value_info("choice", TensorProto.BOOL, []))
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, SHAPE)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, ir_version=9, functions=functions), path)
    return path


def _block() -> onnx.FunctionProto:
    return helper.make_function("mine", "Block", ["query", "key", "value"], ["output"], [flash_node()], OPSETS)


def test_a_node_in_a_function_counts_once_for_each_call(tmp_path: Path) -> None:
    calls = [
        helper.make_node("Block", ["query", "key", "value"], ["half"], domain="mine"),
        helper.make_node("Block", ["half", "key", "value"], ["output"], domain="mine"),
    ]
    assert len(read(_save(tmp_path / "m.onnx", calls, [_block()])).flash_nodes) == 2


def test_a_function_that_nobody_calls_counts_for_nothing(tmp_path: Path) -> None:
    path = _save(tmp_path / "m.onnx", [helper.make_node("Identity", ["query"], ["output"])], [_block()])
    assert read(path).flash_nodes == ()


def test_an_operator_of_ours_that_nobody_knows_is_refused_unless_it_has_a_body(tmp_path: Path) -> None:
    node = helper.make_node("FlashFoo", ["query"], ["output"], name="strange", domain=DOMAIN)
    with pytest.raises(UnsupportedModel, match=r'node "strange"\n +got +FlashFoo'):
        read(_save(tmp_path / "m.onnx", [node]))
    body = helper.make_node("Identity", ["x"], ["y"])
    known = helper.make_function(DOMAIN, "FlashFoo", ["x"], ["y"], [body], OPSETS)
    assert read(_save(tmp_path / "m.onnx", [node], [known])).flash_nodes == ()


def test_an_attribute_by_reference_gets_the_value_of_the_call(tmp_path: Path) -> None:
    node = flash_node()
    scale = next(a for a in node.attribute if a.name == "scale")
    scale.CopyFrom(onnx.AttributeProto(name="scale", type=onnx.AttributeProto.FLOAT, ref_attr_name="my_scale"))
    block = helper.make_function("mine", "Block", ["query", "key", "value"], ["output"], [node], OPSETS, ["my_scale"])
    call = helper.make_node("Block", ["query", "key", "value"], ["output"], domain="mine", my_scale=0.75)
    assert read(_save(tmp_path / "m.onnx", [call], [block])).flash_nodes[0].attributes["scale"] == 0.75


def test_both_branches_of_an_if_count(tmp_path: Path) -> None:
    value = [helper.make_tensor_value_info("made", TensorProto.FLOAT, SHAPE)]
    one = helper.make_graph([flash_node(output="made", name="then")], "t", [], value)
    two = helper.make_graph(
        [flash_node(output="x", name="a"), flash_node(("x", "key", "value"), "made", name="b")], "e", [], value
    )
    path = _save(
        tmp_path / "m.onnx", [helper.make_node("If", ["choice"], ["output"], then_branch=one, else_branch=two)]
    )
    assert sorted((node.name, node.is_needed) for node in read(path).flash_nodes) == [
        ("a", True),
        ("b", True),
        ("then", True),
    ]


def test_a_node_that_no_output_needs_is_marked(tmp_path: Path) -> None:
    path = _save(tmp_path / "m.onnx", [flash_node(output="unused", name="dead"), flash_node(name="alive")])
    assert [(node.name, node.is_needed) for node in read(path).flash_nodes] == [("dead", False), ("alive", True)]


def test_the_body_of_a_fused_file_is_not_counted(tmp_path: Path) -> None:
    assert len(read(fused(tmp_path / "m.onnx")).flash_nodes) == 1


def test_inputs_with_a_default_are_no_inputs(tmp_path: Path) -> None:
    path = fused(tmp_path / "m.onnx", constants={"query": np.zeros((1, HEADS, 5, HEAD_DIM), np.float32)})
    assert [graph_input.name for graph_input in read(path).inputs] == ["key", "value"]


@pytest.mark.parametrize("content", [b"", b"not a protobuf at all\n", b"\x08\x09", None])
def test_what_is_no_onnx_model_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"read|ONNX"):
        read(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        read(tmp_path)


def _with_external_weights(path: Path, location: str) -> Path:
    weights = numpy_helper.from_array(np.ones((HEAD_DIM, HEAD_DIM), np.float32), "weights")
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=location)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [HEAD_DIM])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [HEAD_DIM])]
    nodes = [helper.make_node("MatMul", ["x", "weights"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, [weights]), opset_imports=OPSETS[:1])
    path.write_bytes(model.SerializeToString())
    return path


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone"):
        read(_with_external_weights(tmp_path / "m.onnx", "gone.data"))


@pytest.mark.parametrize("location", ["../outside.data", "/etc/hostname", "a/../../outside.data"])
def test_weights_outside_the_models_folder_are_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.data").write_bytes(bytes(HEAD_DIM * HEAD_DIM * 4))
    with pytest.raises(UnsafeInput, match="inside"):
        read(_with_external_weights(folder / "m.onnx", location))


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.data").write_bytes(bytes(HEAD_DIM * HEAD_DIM * 4))
    (folder / "link.data").symlink_to(tmp_path / "outside.data")
    with pytest.raises(UnsafeInput):
        read(_with_external_weights(folder / "m.onnx", "link.data"))


def test_weights_in_the_folder_are_listed(tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(bytes(HEAD_DIM * HEAD_DIM * 4))
    assert read(_with_external_weights(tmp_path / "m.onnx", "w.data")).external_files == [tmp_path / "w.data"]


def test_calls_without_attention_in_them_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels, seen = 12, []
    functions = [_block()]
    for level in range(levels):
        called = f"F{level + 1}" if level < levels - 1 else "Leaf"
        nodes = [
            helper.make_node(called, ["a"], ["t"], domain="mine"),
            helper.make_node(called, ["t"], ["b"], domain="mine"),
        ]
        functions.append(helper.make_function("mine", f"F{level}", ["a"], ["b"], nodes, OPSETS))
    leaf = [helper.make_node("Neg", ["a"], ["b"])]
    functions.append(helper.make_function("mine", "Leaf", ["a"], ["b"], leaf, OPSETS))
    calls = [
        helper.make_node("F0", ["query"], ["half"], domain="mine"),
        helper.make_node("Block", ["half", "key", "value"], ["output"], domain="mine"),
    ]
    path = _save(tmp_path / "m.onnx", calls, functions)
    live = onnx_file._live
    monkeypatch.setattr(onnx_file, "_live", lambda nodes, outputs: seen.append(nodes) or live(nodes, outputs))
    assert len(read(path).flash_nodes) == 1
    assert len(seen) == 2  # the graph and the block


def test_a_negative_size_is_read_as_a_dynamic_dim(tmp_path: Path) -> None:
    """As older exporters and runtimes write one; TensorRT reads it so as well."""
    model = onnx.load(fused(tmp_path / "m.onnx"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[2].dim_value = -1
    onnx.save(model, tmp_path / "m.onnx")
    file = read(tmp_path / "m.onnx")
    assert {tensor.dims for tensor in (*file.inputs, *file.output_tensors)} == {("batch", HEADS, "", HEAD_DIM)}
