# SPDX-License-Identifier: Apache-2.0
"""flash_trt.session and cpu_operator_path: the fused file on a CPU, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from contract import tensors
from contract.cases import Case
from contract.node_model import model_of_case
from python import attention_models

import flash_trt
from flash_export.errors import MissingHere, UnsupportedModel, UsageError


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    return attention_models.fused(tmp_path / "model.onnx")


def edited(path: Path, edit: Callable[[onnx.ModelProto], None]) -> Path:
    proto = onnx.load(path)
    edit(proto)
    onnx.save(proto, path)
    return path


def test_a_session_runs_the_operator_and_agrees_with_the_functions(fused: Path) -> None:
    rng = np.random.default_rng(7)
    shape = (2, attention_models.HEADS, 37, attention_models.HEAD_DIM)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name in ("query", "key", "value")}
    ours = flash_trt.session(fused, intra_op_num_threads=1)
    plain = onnxruntime.InferenceSession(fused, providers=["CPUExecutionProvider"])
    assert ours.get_session_options().intra_op_num_threads == 1
    np.testing.assert_allclose(ours.run(None, feeds)[0], plain.run(None, feeds)[0], atol=1e-5)
    assert edited(fused, lambda proto: proto.ClearField("functions"))
    flash_trt.session(fused).run(None, feeds)  # nothing but the operator can run the nodes now


def test_an_option_that_onnx_runtime_lacks_is_named(fused: Path) -> None:
    with pytest.raises(UsageError, match="no such option") as error:
        flash_trt.session(fused, intra_op_threads=1)
    assert "intra_op_threads=1" in str(error.value)


@pytest.mark.parametrize("name", ["intra_op_threads", "add_session_config_entry", "__class__"])
def test_what_is_no_option_is_no_option(fused: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no such option"):
        flash_trt.session(fused, **{name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("intra_op_num_threads", "two"),
        ("intra_op_num_threads", None),
        ("intra_op_num_threads", 2**40),
        ("graph_optimization_level", 3),
        ("profile_file_prefix", 5),
    ],
)
def test_a_value_that_an_option_does_not_take_is_named_with_its_default(fused: Path, name: str, value: object) -> None:
    with pytest.raises(UsageError, match="does not take this value") as error:
        flash_trt.session(fused, **{name: value})
    assert error.value.where == f"option {name}"
    assert f"{name}={value!r}" in error.value.got
    assert repr(getattr(onnxruntime.SessionOptions(), name)) in error.value.need


@pytest.mark.parametrize("path", ["a\0b", 5, None, b"m.onnx", ["m.onnx"]], ids=repr)
@pytest.mark.parametrize("opened", [flash_trt.session, flash_trt.open_engine, flash_trt.why_not_here])
def test_what_names_no_file_is_told_with_what_would(opened: Callable[[object], object], path: object) -> None:
    with pytest.raises(UsageError, match="names no file") as error:
        opened(path)
    assert repr(path) in error.value.got


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [("scale", float("nan"), "nan"), ("causal", 5, "5"), ("plugin_version", "abc", "version abc")],
)
def test_an_attribute_that_the_operator_refuses_is_told_in_its_own_words(
    fused: Path, name: str, value: object, got: str
) -> None:
    def change(proto: onnx.ModelProto) -> None:
        (attribute,) = (a for a in proto.graph.node[0].attribute if a.name == name)
        attribute.CopyFrom(onnx.helper.make_attribute(name, value))

    with pytest.raises(UnsupportedModel, match="cannot create FlashAttention") as error:
        flash_trt.session(edited(fused, change))
    assert error.value.where == f'node "attention", attribute {name}'
    assert error.value.got == got


def test_an_operator_that_nobody_knows_is_named(fused: Path) -> None:
    def strange(proto: onnx.ModelProto) -> None:
        proto.graph.node.append(onnx.helper.make_node("Strange", ["output"], ["more"], domain="theirs"))
        proto.opset_import.append(onnx.helper.make_opsetid("theirs", 1))

    with pytest.raises(UnsupportedModel, match="ONNX Runtime cannot load the model") as error:
        flash_trt.session(edited(fused, strange))
    assert "theirs:Strange" in error.value.got


def test_an_unknown_attribute_is_named(fused: Path) -> None:
    extra = onnx.helper.make_attribute("alibi", 1)
    with pytest.raises(UsageError, match="alibi"):
        flash_trt.session(edited(fused, lambda proto: proto.graph.node[0].attribute.append(extra)))


def _replace(name: str, value: object) -> Callable[[onnx.NodeProto], None]:
    """Writes an attribute anew, as whatever ``value`` is; None takes it away."""

    def change(node: onnx.NodeProto) -> None:
        node.attribute.remove(next(a for a in node.attribute if a.name == name))
        if value is not None:
            node.attribute.append(onnx.helper.make_attribute(name, value))

    return change


@pytest.mark.parametrize("place", ["graph", "branch"])
@pytest.mark.parametrize(
    ("name", "change", "got", "need"),
    [
        ("softcap", _replace("softcap", None), "none", "one FLOAT from 0 to 1e+30"),
        ("causal", _replace("causal", None), "none", "one INT from 0 to 1"),
        ("plugin_namespace", _replace("plugin_namespace", None), "none", 'the STRING "flash_export"'),
        ("scale", _replace("scale", 1), "one of type INT", "one FLOAT from -1e+30 to 1e+30"),
        ("plugin_version", _replace("plugin_version", 1), "one of type INT", 'the STRING "1"'),
        ("layout", _replace("layout", [0]), "one of type INTS", "one INT from 0 to 1"),
        (
            "causal",
            lambda node: node.attribute.append(onnx.helper.make_attribute("causal", 1)),
            "it twice",
            "each attribute once",
        ),
        (
            "alibi",
            lambda node: node.attribute.append(onnx.helper.make_attribute("alibi", 1)),
            "an attribute that the operator does not have",
            "layout, q_num_heads",
        ),
    ],
    ids=["missing", "missing_int", "no_namespace", "int", "int_version", "list", "twice", "unknown"],
)
def test_attributes_that_are_not_the_operators_are_told_with_their_node(
    fused: Path, name: str, change: Callable[[onnx.NodeProto], None], got: str, need: str, place: str
) -> None:
    def edit(proto: onnx.ModelProto) -> None:
        node = next(n for n in proto.graph.node if n.domain == "flash_export")
        node.name = "odd one"
        change(node)
        if place == "branch":
            _into_branches(proto, node)

    path = edited(fused, edit)
    with pytest.raises(UsageError, match="attributes are not the operator's") as error:
        flash_trt.session(path)
    assert error.value.where == f'{path}, node "odd one", attribute {name}'
    assert error.value.got == got
    assert need in error.value.need


def _into_branches(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Puts the node into a branch of an If, its other branch an empty tensor."""
    shaped = onnx.helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, ["a", "b", "c"])
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.output[0] = "inner"
    nothing = onnx.helper.make_node("Constant", [], ["inner"], value_floats=[0.0])
    branches = {
        f"{name}_branch": onnx.helper.make_graph([n], name, [], [shaped])
        for name, n in (("then", inner), ("else", nothing))
    }
    true = onnx.helper.make_tensor("true", onnx.TensorProto.BOOL, [], [True])
    proto.graph.initializer.append(true)
    proto.graph.node.insert(
        list(proto.graph.node).index(node), onnx.helper.make_node("If", ["true"], [node.output[0]], **branches)
    )
    proto.graph.node.remove(node)


@pytest.mark.parametrize(
    ("tensor", "dtype", "need"),
    [
        ("bias", onnx.TensorProto.FLOAT16, "the query's type, FLOAT"),
        ("key", onnx.TensorProto.FLOAT16, "the query's type, FLOAT"),
        ("query", onnx.TensorProto.DOUBLE, "FLOAT, FLOAT16 or BFLOAT16"),
        ("kv_lengths", onnx.TensorProto.INT64, "INT32"),
        ("sinks", onnx.TensorProto.FLOAT16, "FLOAT"),
    ],
)
def test_a_type_that_the_operator_does_not_take_is_told_with_the_rule(
    tmp_path: Path, tensor: str, dtype: int, need: str
) -> None:
    case = Case(name="types", operator="FlashAttentionEx", bias_shape=(2, 2, 37, 53), kv_lengths=(3, 9), sinks=2)
    proto = model_of_case(case, tensors.node_inputs(case, tensors.make(case)), 18)
    del proto.functions[:]
    next(v for v in proto.graph.input if v.name == tensor).type.tensor_type.elem_type = dtype
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModel, match="a type that the operator does not take") as error:
        flash_trt.session(tmp_path / "model.onnx")
    assert error.value.where == f'{tmp_path / "model.onnx"}, node "attention", tensor {tensor} ("{tensor}")'
    assert error.value.got == onnx.TensorProto.DataType.Name(dtype)
    assert error.value.need == need


@pytest.mark.parametrize("place", ["branch", "function", "function_in_branch", "function_of_opset_17"])
def test_a_type_is_told_wherever_the_node_is(tmp_path: Path, place: str) -> None:
    """The clash shows only with the types of the call, and behind a node whose output the file says no type of."""
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    shape = [1, attention_models.HEADS, 3, attention_models.HEAD_DIM]
    helper = onnx.helper
    nodes = [
        helper.make_node("Neg", ["key"], ["negative"]),
        attention_models.flash_node(("query", "negative", "value"), name="odd one"),
    ]
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 18), ("flash_export", 1), ("mine", 1))]
    inner = [helper.make_opsetid("", 17), *opsets[1:]] if "opset_17" in place else opsets
    function = helper.make_function("mine", "Block", ["query", "key", "value"], ["output"], nodes, inner)
    if "function" in place:
        nodes = [helper.make_node("Block", ["query", "cache", "value"], ["output"], domain="mine")]
        nodes.insert(0, helper.make_node("Identity", ["key"], ["cache"]))
    output = helper.make_tensor_value_info("output", single, shape)
    if "branch" in place:
        nothing = helper.make_node("Identity", ["query"], ["output"])
        branches = {
            f"{name}_branch": helper.make_graph(n, name, [], [output])
            for name, n in (("then", nodes), ("else", [nothing]))
        }
        nodes = [helper.make_node("If", ["choice"], ["result"], **branches)]
        output = helper.make_tensor_value_info("result", single, shape)
    types = {"query": single, "key": half, "value": single}
    inputs = [helper.make_tensor_value_info(name, dtype, shape) for name, dtype in types.items()]
    inputs.append(helper.make_tensor_value_info("choice", onnx.TensorProto.BOOL, []))
    graph = helper.make_graph(nodes, "g", inputs, [output])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=[function]), path)
    with pytest.raises(UnsupportedModel, match="a type that the operator does not take") as error:
        flash_trt.session(path)
    assert error.value.where == f'{path}, node "odd one", tensor key ("negative")'
    assert (error.value.got, error.value.need) == ("FLOAT16", "the query's type, FLOAT")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no such folder/x.onnx", "No such file or directory"),
        ("no such folder/x.ort", "Failed to save ORT format model"),
        ("", "Is a directory"),
        ("model.onnx/x.onnx", "Not a directory"),
        ("/dev/full", "serialization failed"),
    ],
)
def test_a_file_that_an_option_asks_for_and_cannot_be_written_is_no_fault_of_the_model(
    fused: Path, path: str, why: str
) -> None:
    asked = str(fused.parent / path)
    with pytest.raises(UsageError, match="cannot write a file") as error:
        flash_trt.session(fused, optimized_model_filepath=asked, log_severity_level=4)
    assert error.value.where == "option optimized_model_filepath"
    assert f"optimized_model_filepath={asked!r}: " in error.value.got
    assert why in error.value.got


@pytest.mark.parametrize(
    ("name", "value", "need"),
    [
        ("intra_op_num_threads", -3, "0 or more"),
        ("inter_op_num_threads", -1, "0 or more"),
        ("log_severity_level", 9, "-1 to 4"),
        ("log_severity_level", -2, "-1 to 4"),
    ],
)
def test_a_value_outside_an_options_range_is_a_bad_option(fused: Path, name: str, value: int, need: str) -> None:
    with pytest.raises(UsageError, match="does not take this value") as error:
        flash_trt.session(fused, **{name: value})
    assert (error.value.where, error.value.got, error.value.need) == (f"option {name}", f"{name}={value}", need)


def test_a_newer_operator_version_is_refused_with_both(fused: Path) -> None:
    def newer(proto: onnx.ModelProto) -> None:
        next(opset for opset in proto.opset_import if opset.domain == "flash_export").version = 2

    with pytest.raises(UnsupportedModel, match="newer") as error:
        flash_trt.session(edited(fused, newer))
    assert "version 2" in error.value.got
    assert "version 1" in error.value.need


def test_a_newer_operator_version_of_a_function_is_refused_too(fused: Path) -> None:
    """It has opsets of its own; ONNX Runtime runs it as the model's version."""

    def newer(proto: onnx.ModelProto) -> None:
        node = next(node for node in proto.graph.node if node.domain == "flash_export")
        opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("flash_export", 2)]
        names = list(node.input), list(node.output)
        proto.functions.append(onnx.helper.make_function("mine", "Block", *names, [node], opsets))
        node.CopyFrom(onnx.helper.make_node("Block", *names, domain="mine"))
        proto.opset_import.append(onnx.helper.make_opsetid("mine", 1))

    path = edited(fused, newer)
    with pytest.raises(UnsupportedModel, match="newer") as error:
        flash_trt.session(path)
    assert error.value.where == f'{path}, function "Block"'
    assert "version 2" in error.value.got


def _loose(proto: onnx.ModelProto, how: str) -> None:
    """Makes it a model that onnx's checker refuses and ONNX Runtime runs."""
    if how == "no_graph_name":
        proto.graph.name = ""
    elif how == "no_output_shape":
        proto.graph.output[0].type.tensor_type.ClearField("shape")
    elif how == "no_output_type":
        proto.graph.output[0].ClearField("type")
    else:  # before version 4 of the format an initializer was to be an input too
        proto.ir_version = 3
        del proto.functions[:]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "one"))
        proto.graph.node.append(onnx.helper.make_node("Mul", ["output", "one"], ["product"]))
        proto.graph.output[0].name = "product"


LOOSE = ("no_graph_name", "no_output_shape", "no_output_type", "initializer_that_is_no_input")


@pytest.mark.parametrize("how", LOOSE)
def test_a_model_that_only_the_checker_refuses_runs(fused: Path, how: str) -> None:
    shape = (2, attention_models.HEADS, 37, attention_models.HEAD_DIM)
    feeds = {name: np.ones(shape, np.float32) for name in ("query", "key", "value")}
    (wanted,) = flash_trt.session(fused).run(None, feeds)
    path = edited(fused, lambda proto: _loose(proto, how))
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(str(path))
    (found,) = flash_trt.session(path).run(None, feeds)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("how", LOOSE)
def test_a_newer_version_is_told_whatever_the_checker_has_against_the_model(fused: Path, how: str) -> None:
    def newer(proto: onnx.ModelProto) -> None:
        _loose(proto, how)
        next(opset for opset in proto.opset_import if opset.domain == "flash_export").version = 2

    with pytest.raises(UnsupportedModel, match="newer"):
        flash_trt.session(edited(fused, newer))


@pytest.mark.parametrize("how", LOOSE)
def test_an_unknown_attribute_is_told_whatever_the_checker_has_against_the_model(fused: Path, how: str) -> None:
    def extra(proto: onnx.ModelProto) -> None:
        _loose(proto, how)
        node = next(node for node in proto.graph.node if node.domain == "flash_export")
        node.attribute.append(onnx.helper.make_attribute("alibi", 1))

    with pytest.raises(UsageError, match="alibi"):
        flash_trt.session(edited(fused, extra))


def test_no_such_model_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        flash_trt.session(tmp_path / "nothing.onnx")


def test_a_missing_library_lists_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_TRT_CPU_OPERATOR", raising=False)
    monkeypatch.setattr("flash_trt.native.find", lambda library: None)
    with pytest.raises(MissingHere, match="missing") as error:
        flash_trt.cpu_operator_path()
    assert "flash_trt/lib" in error.value.where


def test_the_environment_names_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fused: Path) -> None:
    library = tmp_path / "other.so"
    monkeypatch.setenv("FLASH_TRT_CPU_OPERATOR", str(library))
    with pytest.raises(MissingHere, match="missing"):
        flash_trt.cpu_operator_path()
    library.write_text("no library")
    assert flash_trt.cpu_operator_path() == str(library)
    with pytest.raises(MissingHere, match="does not load"):
        flash_trt.session(fused)
