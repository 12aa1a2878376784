# SPDX-License-Identifier: Apache-2.0
"""A comparison that a fault of attention would pass as well is told: it proves nothing of attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper, numpy_helper
from python.attention_models import FLOAT, HALF, HEAD_DIM, HEADS, OPSET, SCALE, flash_node, fused, unfused

from flash_export.errors import EXIT_NUMBERS_DIFFER, EXIT_OK, EXIT_UNSUPPORTED, EXIT_USAGE
from flash_export.op import DOMAIN
from flash_trt import compare_fault

Command = Callable[..., int]
ONE_KEY = f"query:2x{HEADS}x1x{HEAD_DIM}"


def _pair(tmp_path: Path, *, dtype: int = FLOAT, scale: float = SCALE) -> tuple[Path, Path]:
    return fused(tmp_path / "f.onnx", flash_node(scale=scale), dtype=dtype), unfused(tmp_path / "u.onnx", dtype=dtype)


def _short(path: Path, most: int = 7) -> Path:
    """The model with a table of ``most`` positions added to its output: it takes no longer lengths."""
    model = onnx.load(path)
    output = model.graph.output[0].name
    constants = {"places": np.zeros((most, 1), np.float32), "first": np.array(0), "step": np.array(1)}
    model.graph.initializer.extend(numpy_helper.from_array(array, f"t_{name}") for name, array in constants.items())
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["query"], ["t_sizes"], start=2, end=3),
            helper.make_node("Squeeze", ["t_sizes"], ["t_length"]),
            helper.make_node("Range", ["t_first", "t_length", "t_step"], ["t_rows"]),
            helper.make_node("Gather", ["t_places", "t_rows"], ["t_placed"]),
            helper.make_node("Add", [output, "t_placed"], ["placed"]),
        ]
    )
    model.graph.output[0].name = "placed"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("scale", [SCALE, 3 * SCALE])
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["fp32", "fp16"])
def test_the_users_shapes_of_one_key_are_warned_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], scale: float, dtype: int
) -> None:
    pair, written = _pair(tmp_path, dtype=dtype, scale=scale), tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--shape", ONE_KEY, "--json", written) == EXIT_OK
    assert "nothing of attention was compared" in " ".join(capsys.readouterr().err.split())
    verdict = json.loads(written.read_text())
    assert (verdict["passed"], verdict["attention_compared"]) == (True, False)


@pytest.mark.parametrize("scale", [SCALE, 3 * SCALE])
def test_drawn_runs_that_all_have_one_key_are_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], scale: float
) -> None:
    pair, written = [_short(path, 2) for path in _pair(tmp_path, scale=scale)], tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--json", written) == EXIT_USAGE
    told = " ".join(capsys.readouterr().err.split())
    assert "nothing of attention was compared" in told
    assert "--shape NAME:MIN,OPT,MAX" in told
    verdict = json.loads(written.read_text())
    assert (verdict["passed"], verdict["attention_compared"]) == (False, False)


@pytest.mark.parametrize(("scale", "code"), [(SCALE, EXIT_OK), (1.01 * SCALE, EXIT_NUMBERS_DIFFER)])
def test_a_model_of_few_positions_is_compared_on_several_keys(
    tmp_path: Path, flash_trt: Command, scale: float, code: int
) -> None:
    pair, written = [_short(path, 3) for path in _pair(tmp_path, scale=scale)], tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--json", written) == code
    assert json.loads(written.read_text())["attention_compared"] is True


def test_lengths_of_several_keys_that_the_model_takes_are_compared(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, written = [_short(path) for path in _pair(tmp_path)], tmp_path / "v.json"
    shape = f"query:1x{HEADS}x2x{HEAD_DIM},2x{HEADS}x5x{HEAD_DIM},2x{HEADS}x7x{HEAD_DIM}"
    assert flash_trt("compare", *pair, "--shape", shape, "--json", written) == EXIT_OK
    assert "nothing of attention" not in " ".join(capsys.readouterr().err.split())
    assert json.loads(written.read_text())["attention_compared"] is True


def test_a_fused_file_with_its_weights_beside_it_is_tried_with_the_fault_too(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The constant lies in another file, which the model with the fault has to find."""
    pair = _pair(tmp_path)
    weight = np.ones((HEADS, 1, HEAD_DIM), np.float32)
    for path in pair:
        model = onnx.load(path)
        model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
        model.graph.node.append(helper.make_node("Mul", ["output", "weight"], ["scaled_output"]))
        model.graph.output[0].name = "scaled_output"
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=200)
    assert flash_trt("compare", *pair, "--shape", ONE_KEY) == EXIT_OK
    assert "nothing of attention was compared" in " ".join(capsys.readouterr().err.split())


def test_a_fused_file_that_onnx_runtime_does_not_load_is_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnx's reference evaluator takes float indices; no runtime does."""
    pair = _pair(tmp_path)
    model = onnx.load(pair[0])
    model.graph.initializer.append(numpy_helper.from_array(np.array([0.0, 1.0, 2.0], np.float32), "order"))
    model.graph.node.append(helper.make_node("Gather", ["output", "order"], ["gathered"], axis=1))
    model.graph.output[0].name = "gathered"
    onnx.save(model, pair[0])
    assert flash_trt("compare", *pair) == EXIT_UNSUPPORTED
    assert "ONNX Runtime cannot load the fused model" in " ".join(capsys.readouterr().err.split())


def _beside_a_blind_one(tmp_path: Path, *, blind_first: bool, blind_scale: float = SCALE) -> tuple[Path, Path]:
    """FUSED has two nodes, and of one only the first row, which sees its own key alone, is an output."""
    blind, seen = flash_node(output="all", name="blind", scale=blind_scale), flash_node(name="seen")
    nodes = [blind, seen] if blind_first else [seen, blind]
    pair = fused(tmp_path / "f.onnx", *nodes), unfused(tmp_path / "u.onnx")
    for path, source in zip(pair, ("all", "value"), strict=True):
        model = onnx.load(path)
        bounds = {"from_": [0], "to": [1], "along": [2]}
        model.graph.initializer.extend(numpy_helper.from_array(np.array(v), name) for name, v in bounds.items())
        model.graph.node.append(helper.make_node("Slice", [source, *bounds], ["first"]))
        model.graph.output.append(helper.make_tensor_value_info("first", FLOAT, ["batch", HEADS, 1, HEAD_DIM]))
        onnx.save(model, path)
    return pair


@pytest.mark.parametrize("blind_scale", [SCALE, 5 * SCALE])
@pytest.mark.parametrize("blind_first", [True, False])
def test_an_attention_that_no_output_shows_is_named_beside_one_that_is_seen(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], blind_first: bool, blind_scale: float
) -> None:
    pair = _beside_a_blind_one(tmp_path, blind_first=blind_first, blind_scale=blind_scale)
    written = tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--json", written) == EXIT_USAGE
    assert 'nothing of node "blind" was compared' in " ".join(capsys.readouterr().err.split())
    verdict = json.loads(written.read_text())
    assert (verdict["passed"], verdict["attention_compared"]) == (False, False)
    assert (verdict["nodes_not_compared"], verdict["nodes_tried_alone"]) == (["blind"], True)
    shape = f"query:2x{HEADS}x9x{HEAD_DIM}"
    assert flash_trt("compare", *pair, "--shape", shape) == EXIT_OK
    assert 'nothing of node "blind" was compared' in " ".join(capsys.readouterr().err.split())


def test_two_attentions_that_are_seen_pass(tmp_path: Path, flash_trt: Command) -> None:
    pair, written = _beside_a_blind_one(tmp_path, blind_first=True), tmp_path / "v.json"
    for path, output in zip(pair, ("all", "output"), strict=True):
        model = onnx.load(path)
        model.graph.node.append(helper.make_node("Identity", [output], ["second"]))
        model.graph.output.append(helper.make_tensor_value_info("second", FLOAT, ["batch", HEADS, "seq", HEAD_DIM]))
        onnx.save(model, path)
    assert flash_trt("compare", *pair, "--json", written) == EXIT_OK
    verdict = json.loads(written.read_text())
    assert (verdict["attention_compared"], verdict["nodes_not_compared"]) == (True, [])


def test_an_attention_whose_output_nothing_reads_is_not_asked_for(tmp_path: Path, flash_trt: Command) -> None:
    pair = _beside_a_blind_one(tmp_path, blind_first=True)
    for path in pair:
        model = onnx.load(path)
        del model.graph.output[1]
        onnx.save(model, path)
    assert flash_trt("compare", *pair) == EXIT_OK


def test_attentions_of_a_large_model_are_tried_together_and_that_is_said(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_fault, "_MOST_LOADED", 1000)
    pair, written = _beside_a_blind_one(tmp_path, blind_first=True), tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--json", written) == EXIT_OK
    assert "all at once, not each alone" in " ".join(capsys.readouterr().err.split())
    assert json.loads(written.read_text())["nodes_tried_alone"] is False


def _in_a_branch(path: Path, *, one_name: bool = False) -> Path:
    """The model with its FlashAttention node in both branches of an If, named as they are or alike."""
    model = onnx.load(path)
    node, output = model.graph.node[0], model.graph.output[0]
    branches = {}
    for branch in ("then_branch", "else_branch"):
        inner = onnx.NodeProto()
        inner.CopyFrom(node)
        inner.name, inner.output[0] = "attention" if one_name else branch, branch
        made = helper.make_tensor_value_info(branch, FLOAT, ["batch", HEADS, "seq", HEAD_DIM])
        branches[branch] = helper.make_graph([inner], branch, [], [made])
    # A condition that ONNX Runtime does not know before it runs.
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "none"))
    makes = [
        helper.make_node("Size", ["query"], ["count"]),
        helper.make_node("Greater", ["count", "none"], ["any"]),
        helper.make_node("If", ["any"], [output.name], **branches),
    ]
    del model.graph.node[:]
    model.graph.node.extend(makes)
    onnx.save(model, path)
    return path


def test_an_attention_in_a_branch_is_tried_too(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that sees one key alone is told, and so is the branch that no input takes."""
    fused_path, unfused_path = _pair(tmp_path)
    pair = _in_a_branch(fused_path), unfused_path
    assert flash_trt("compare", *pair, "--shape", ONE_KEY) == EXIT_OK
    assert "nothing of attention was compared" in " ".join(capsys.readouterr().err.split())
    assert flash_trt("compare", *pair) == EXIT_USAGE
    assert 'nothing of node "else_branch" was compared' in " ".join(capsys.readouterr().err.split())


def test_attentions_of_one_name_are_tried_each_alone(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    fused_path, unfused_path = _pair(tmp_path)
    assert flash_trt("compare", _in_a_branch(fused_path, one_name=True), unfused_path) == EXIT_USAGE
    assert 'nothing of node "attention" was compared' in " ".join(capsys.readouterr().err.split())


def test_a_node_that_does_not_run_is_not_tried_for_one_of_its_name(tmp_path: Path, flash_trt: Command) -> None:
    fused_path, unfused_path = _pair(tmp_path)
    model = onnx.load(fused_path)
    node = onnx.NodeProto()
    node.CopyFrom(next(n for n in model.graph.node if n.domain == DOMAIN))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model.functions.append(helper.make_function("mine", "Uncalled", node.input, node.output, [node], opsets))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    onnx.save(model, fused_path)
    assert flash_trt("compare", fused_path, unfused_path) == EXIT_OK


def _in_a_function(path: Path, scale: float, *, default: bool) -> Path:
    """The model with its FlashAttention node in a function, whose caller, or default, says the scale."""
    model = onnx.load(path)
    node = model.graph.node[0]
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    told = next(a for a in inner.attribute if a.name == "scale")
    told.CopyFrom(AttributeProto(name="scale", ref_attr_name="factor", type=AttributeProto.FLOAT))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    names = [] if default else ["factor"]
    function = helper.make_function("mine", "Attend", inner.input, inner.output, [inner], opsets, names)
    if default:
        function.attribute_proto.append(helper.make_attribute("factor", scale))
    handed = {} if default else {"factor": scale}
    node.CopyFrom(helper.make_node("Attend", node.input, node.output, domain="mine", **handed))
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("default", [True, False])
def test_a_scale_that_a_functions_caller_or_default_says_is_made_wrong_too(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], default: bool
) -> None:
    model, reference = _pair(tmp_path)
    pair, written = (_in_a_function(model, SCALE, default=default), reference), tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--json", written) == EXIT_OK
    assert json.loads(written.read_text())["attention_compared"] is True
    assert flash_trt("compare", *pair, "--shape", ONE_KEY) == EXIT_OK
    assert "nothing of attention was compared" in " ".join(capsys.readouterr().err.split())
    for command in ("inspect", "run"):
        assert flash_trt(command, model) == EXIT_OK
    wrong = _in_a_function(_pair(tmp_path)[0], 1.01 * SCALE, default=default)
    assert flash_trt("compare", wrong, reference) == EXIT_NUMBERS_DIFFER
