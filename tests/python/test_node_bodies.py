# SPDX-License-Identifier: Apache-2.0
"""A file whose function bodies leave out what its nodes say is refused: bodies alone would prove nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from python.attention_models import OPSET, flash_node, fused, unfused, with_bodies

from flash_export.errors import EXIT_OK, EXIT_UNSUPPORTED, EXIT_USAGE, UnsupportedModel, UsageError
from flash_export.function_body import functions_for
from flash_export.op import DOMAIN, OPERATORS, Attributes
from flash_trt import node_bodies, onnx_file

Command = Callable[..., int]


def _changed(path: Path, changes: dict[str, int | float], *, node: int = 0) -> Path:
    """The model at ``path`` with other attributes in one of its nodes; the bodies stay."""
    model = onnx.load(path)
    for attribute in model.graph.node[node].attribute:
        if attribute.name in changes:
            attribute.CopyFrom(helper.make_attribute(attribute.name, changes[attribute.name]))
    onnx.save(model, path)
    return path


def _of_side_inputs(path: Path, opset: int = OPSET, **attributes: int | float) -> Path:
    """A FlashAttentionEx node with all side inputs, and its body; nothing of it is run."""
    operator = OPERATORS["FlashAttentionEx"]
    values = Attributes(**{"q_num_heads": 4, "kv_num_heads": 4, "scale": 0.5} | attributes).as_dict()
    dtype = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=name, type=dtype, shape=ir.Shape(["a", "b", 8])) for name in operator.inputs]
    node = ir.node(operator.name, inputs, dict(values), domain=DOMAIN, num_outputs=len(operator.outputs), name="ex")
    for value, name in zip(node.outputs, operator.outputs, strict=True):
        value.name, value.type, value.shape = name, dtype, ir.Shape(list("abc"))
    opsets = {"": opset, DOMAIN: 1}
    graph = ir.Graph(inputs, list(node.outputs), nodes=[node], opset_imports=opsets, name="g")
    onnx.save(ir.to_proto(ir.Model(graph, ir_version=9, functions=functions_for([node], opset))), path)
    return path


IGNORED: list[tuple[str, dict[str, int | float]]] = [
    ("softcap", {"softcap": 1.0}),
    ("window_left", {"window_left": 20}),
    ("window_right", {"window_right": 20}),
    ("diagonal", {"diagonal": 1}),
    ("layout", {"layout": 0}),
]


@pytest.mark.parametrize(("name", "changes"), IGNORED, ids=[name for name, _ in IGNORED])
def test_an_attribute_that_the_body_leaves_out_is_refused_by_name(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], name: str, changes: dict[str, int | float]
) -> None:
    second = flash_node(("output", "key", "value"), "more", name="second")
    model = fused(tmp_path / "f.onnx", flash_node(), second, outputs={"more": onnx.TensorProto.FLOAT})
    reference = unfused(tmp_path / "u.onnx")
    assert flash_trt("run", model, "--bodies", "--on", "cpu") == EXIT_OK
    _changed(model, changes, node=1)
    for arguments in (("compare", model, reference), ("run", model, "--bodies", "--on", "cpu"), ("build", model)):
        assert flash_trt(*arguments) == EXIT_UNSUPPORTED
        told = " ".join(capsys.readouterr().err.split())
        assert f'node "second", attribute {name}' in told
        assert "do export the model again" in told


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("name", ["has_bias", "has_kv_lengths", "has_sinks", "causal"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_side_input_that_is_switched_on_or_off_is_refused_by_name(
    tmp_path: Path, opset: int, name: str, before: int
) -> None:
    model = _of_side_inputs(tmp_path / "m.onnx", opset, **{name: before})
    node_bodies.require_obeyed(onnx_file.read(model))
    _changed(model, {name: 1 - before})
    if (name, before) == ("causal", 1):  # which its body reads
        node_bodies.require_obeyed(onnx_file.read(model))
        return
    with pytest.raises(UnsupportedModel) as caught:
        node_bodies.require_obeyed(onnx_file.read(model))
    assert caught.value.where.endswith(f'node "ex", attribute {name}')
    assert caught.value.got.startswith(f"{name} {1 - before}")


def test_a_grouped_node_with_a_body_of_as_many_heads_is_refused(tmp_path: Path) -> None:
    model = _changed(_of_side_inputs(tmp_path / "m.onnx"), {"kv_num_heads": 2})
    with pytest.raises(UnsupportedModel, match="function body"):
        node_bodies.require_obeyed(onnx_file.read(model))


def test_another_scale_than_that_of_a_body_without_references_is_refused(tmp_path: Path) -> None:
    """Before opset 12 a body holds the attributes' numbers themselves."""
    model = _of_side_inputs(tmp_path / "m.onnx", 11)
    node_bodies.require_obeyed(onnx_file.read(model))
    _changed(model, {"scale": 0.25})
    with pytest.raises(UnsupportedModel, match="function body"):
        node_bodies.require_obeyed(onnx_file.read(model))


def test_a_body_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    path = fused(tmp_path / "m.onnx")
    model = onnx.load(path)
    model.functions[0].node[-1].input.reverse()
    onnx.save(model, path)
    with pytest.raises(UnsupportedModel, match="function body"):
        node_bodies.require_obeyed(onnx_file.read(path))


def test_a_part_of_a_file_keeps_the_body_of_the_whole(tmp_path: Path) -> None:
    """What cuts a graph leaves the functions as they are: they hold more than the nodes that are left need."""
    others = [flash_node(output="a", softcap=3.0), flash_node(output="b", causal=0, window_left=3, diagonal=1)]
    model = onnx.load(fused(tmp_path / "m.onnx"))
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    whole.graph.node.extend(others)
    del whole.functions[:]
    model.functions[0].CopyFrom(with_bodies(whole).functions[0])
    onnx.save(model, tmp_path / "part.onnx")
    node_bodies.require_obeyed(onnx_file.read(tmp_path / "part.onnx"))


RANGES: list[dict[str, int | float]] = [
    {"layout": 7},
    {"window_left": -2},
    {"softcap": -1.0},
    {"kv_num_heads": 2},
    {"scale": float("nan")},
    {"has_bias": 1},
]


@pytest.mark.parametrize("changes", RANGES, ids=[next(iter(changes)) for changes in RANGES])
def test_an_attribute_out_of_the_operators_range_is_refused_by_name(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], changes: dict[str, int | float]
) -> None:
    model = _changed(fused(tmp_path / "f.onnx"), changes)
    with pytest.raises(UsageError) as caught:
        node_bodies.require_obeyed(onnx_file.read(model))
    assert 'node "attention"' in caught.value.where
    assert next(iter(changes)) in caught.value.got
    assert flash_trt("compare", model, unfused(tmp_path / "u.onnx")) == EXIT_USAGE
    assert "attention" in capsys.readouterr().err


def test_a_reference_with_a_body_that_ignores_its_node_is_refused_too(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = _changed(fused(tmp_path / "r.onnx", flash_node(softcap=1.0)), {"window_left": 20})
    assert flash_trt("compare", fused(tmp_path / "f.onnx"), reference) == EXIT_UNSUPPORTED
    assert str(reference) in "".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("order", [1, -1])
def test_a_second_body_under_an_overload_is_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], order: int
) -> None:
    """The node asks for the overload, which computes something else than the body of the operator's name."""
    path = fused(tmp_path / "f.onnx")
    model = onnx.load(path)
    other = onnx.FunctionProto()
    other.CopyFrom(model.functions[0])
    other.overload = "another"
    other.node[-1].input.reverse()
    bodies = [model.functions[0], other][::order]
    model.functions.MergeFrom(bodies)
    del model.functions[0]
    model.graph.node[0].overload, model.ir_version = "another", 10
    onnx.save(model, path)
    reference = unfused(tmp_path / "u.onnx")
    for arguments in (("compare", path, reference), ("run", path), ("build", path), ("inspect", path), ("bench", path)):
        assert flash_trt(*arguments) == EXIT_UNSUPPORTED, arguments
        assert "has no overloads" in " ".join(capsys.readouterr().err.split())


def test_text_in_a_body_is_none_of_ours(tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]) -> None:
    path = fused(tmp_path / "f.onnx")
    model = onnx.load(path)
    text = helper.make_tensor("text", onnx.TensorProto.STRING, [2], [b"a", "\u00e9".encode()])
    model.functions[0].node.insert(0, helper.make_node("Constant", [], ["unused"], value=text))
    onnx.save(model, path)
    assert flash_trt("compare", path, unfused(tmp_path / "u.onnx")) == EXIT_UNSUPPORTED
    assert "function body" in capsys.readouterr().err
