# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.helper
import onnx.parser
import onnx_ir as ir
import pytest
from exporter.attention_pairs import Recipe, build

from flash_export.check_structure import BrokenRewrite, attention_nodes, check_structure


@pytest.fixture
def fused() -> onnx.ModelProto:
    return ir.to_proto(build(Recipe(sites=2), fused=True))


def node_of(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.name == "flash_context1")


def replace(node: onnx.NodeProto, name: str, value: object) -> None:
    remove(node, name)
    node.attribute.append(onnx.helper.make_attribute(name, value))


def remove(node: onnx.NodeProto, name: str) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def rename(node: onnx.NodeProto) -> None:
    node.op_type = "FlashAttentionExtra"


BREAKAGES: dict[str, tuple[Callable[[onnx.NodeProto], object], str]] = {
    "an attribute is missing": (lambda n: remove(n, "window_left"), "missing.*window_left"),
    "an attribute is unknown": (lambda n: replace(n, "banana", 1), "unknown.*banana"),
    "a value is out of range": (lambda n: replace(n, "diagonal", 2), "diagonal is 2"),
    "a scale is no number": (lambda n: replace(n, "scale", float("nan")), "scale is nan"),
    "heads do not divide": (lambda n: replace(n, "kv_num_heads", 2), "no multiple"),
    "the plugin's version is missing": (lambda n: remove(n, "plugin_version"), "plugin_version"),
    "the plugin's namespace is another": (lambda n: replace(n, "plugin_namespace", "other"), "other"),
    "an input is missing": (lambda n: n.input.pop(), "inputs"),
    "an input is left out": (lambda n: n.input.__setitem__(3, ""), "inputs"),
    "an output is missing": (lambda n: n.output.pop(), "outputs"),
    "the operator is unknown": (rename, "no operator"),
    "an INT is written as FLOAT": (lambda n: replace(n, "layout", 0.0), "layout"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_node_is_refused_by_name_with_what_is_wrong(name: str, fused: onnx.ModelProto, tmp_path: Path) -> None:
    breakage, message = BREAKAGES[name]
    breakage(node_of(fused))
    onnx.save(fused, tmp_path / "broken.onnx")
    with pytest.raises(BrokenRewrite, match=f"(?s)flash_context1.*{message}"):
        check_structure(tmp_path / "broken.onnx")


def test_a_whole_file_passes(fused: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(fused, tmp_path / "good.onnx")
    check_structure(tmp_path / "good.onnx")


def test_nodes_out_of_order_are_refused(fused: onnx.ModelProto, tmp_path: Path) -> None:
    nodes = list(fused.graph.node)
    del fused.graph.node[:]
    fused.graph.node.extend(reversed(nodes))
    onnx.save(fused, tmp_path / "unsorted.onnx")
    with pytest.raises(BrokenRewrite, match=r"onnx\.checker"):
        check_structure(tmp_path / "unsorted.onnx")


def test_a_missing_weights_file_is_refused(tmp_path: Path) -> None:
    ir.save(build(Recipe(), fused=True), tmp_path / "m.onnx", external_data="m.data")
    check_structure(tmp_path / "m.onnx")
    (tmp_path / "m.data").unlink()
    with pytest.raises(BrokenRewrite, match=r"m\.data"):
        check_structure(tmp_path / "m.onnx")


def test_nodes_in_subgraphs_and_functions_are_judged_too(fused: onnx.ModelProto, tmp_path: Path) -> None:
    node = node_of(fused)
    remove(node, "softcap")
    branch = onnx.helper.make_graph([node], "branch", [], [])
    condition = onnx.helper.make_node("If", ["c"], ["o"], then_branch=branch, else_branch=branch)
    model = onnx.helper.make_model(onnx.helper.make_graph([condition], "g", [], []))
    model.functions.append(
        onnx.helper.make_function("elsewhere", "Block", ["q"], ["o"], [node], [onnx.helper.make_opsetid("", 18)])
    )
    assert len(list(attention_nodes(model))) == 3
    onnx.save(model, tmp_path / "nested.onnx")
    with pytest.raises(BrokenRewrite, match="softcap"):
        check_structure(tmp_path / "nested.onnx")


def test_operators_of_onnx_runtime_beside_ours_are_no_fault(fused: onnx.ModelProto, tmp_path: Path) -> None:
    fused.graph.node.append(onnx.helper.make_node("Gelu", ["output"], ["gelu"], domain="com.microsoft"))
    fused.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(fused, tmp_path / "contrib.onnx")
    check_structure(tmp_path / "contrib.onnx")


LOCAL = """
<ir_version: 9, opset_import: ["" : 18, "own" : 1]>
main (float[3, 5] x) => (float[3, 5] y) { y = own.Turn (x) }
<domain: "own", opset_import: ["" : 18]>
Turn (x) => (y) { y = Transpose <perm = [PERM]> (x) }
"""


def test_a_call_of_a_local_function_is_no_fault_and_what_it_computes_is_still_judged(tmp_path: Path) -> None:
    for name, perm in (("right", "0, 1"), ("wrong", "0, 7")):
        onnx.save(onnx.parser.parse_model(LOCAL.replace("PERM", perm)), tmp_path / f"{name}.onnx")
    check_structure(tmp_path / "right.onnx")
    with pytest.raises(BrokenRewrite, match="perm"):
        check_structure(tmp_path / "wrong.onnx", tmp_path / "right.onnx")


def with_a_wrong_shape(model: onnx.ModelProto, path: Path) -> Path:
    """Says that an output has five dims, which it has not."""
    onnx.save(model, path)
    changed = onnx.load(path)
    del changed.graph.output[0].type.tensor_type.shape.dim[:]
    for _ in range(5):
        changed.graph.output[0].type.tensor_type.shape.dim.add(dim_value=7)
    onnx.save(changed, path)
    return path


def test_a_shape_that_was_wrong_before_is_no_fault_of_the_rewrite(fused: onnx.ModelProto, tmp_path: Path) -> None:
    wrong = with_a_wrong_shape(fused, tmp_path / "fused.onnx")
    unfused = ir.to_proto(build(Recipe(sites=2), fused=False))
    onnx.save(unfused, tmp_path / "right.onnx")
    with pytest.raises(BrokenRewrite, match=r"onnx\.checker"):
        check_structure(wrong, tmp_path / "right.onnx")
    check_structure(wrong, with_a_wrong_shape(unfused, tmp_path / "wrong.onnx"))


def test_a_broken_node_that_was_there_before_is_no_fault_of_the_rewrite(fused: onnx.ModelProto, tmp_path: Path) -> None:
    rename(node_of(fused))
    onnx.save(fused, tmp_path / "fused.onnx")
    onnx.save(ir.to_proto(build(Recipe(sites=2), fused=False)), tmp_path / "unfused.onnx")
    with pytest.raises(BrokenRewrite, match="no operator"):
        check_structure(tmp_path / "fused.onnx", tmp_path / "unfused.onnx")
    check_structure(tmp_path / "fused.onnx", tmp_path / "fused.onnx")
