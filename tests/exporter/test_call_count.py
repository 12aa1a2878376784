# SPDX-License-Identifier: Apache-2.0
"""Calls of functions are counted as if each were written out, at the price of looking at each function once."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import onnx.inliner
import pytest
from onnx import TensorProto, helper

from flash_export.call_count import MANY, Written, written_out
from flash_export.errors import UnsafeInput
from flash_export.load_onnx import LIMITS, Limits, verify

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]


def _chain(operators: list[str]) -> list[onnx.NodeProto]:
    """Nodes of one in- and one output, from ``a`` to ``b``; what is no ONNX operator is a function's name."""
    names = ["a", *(f"t{index}" for index in range(1, len(operators))), "b"]
    return [
        helper.make_node(operator, [names[i]], [names[i + 1]], domain="" if operator == "Neg" else "mine")
        for i, operator in enumerate(operators)
    ]


def _model(main: list[str], functions: dict[str, list[str]]) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("a", "b")]
    bodies = [helper.make_function("mine", name, ["a"], ["b"], _chain(ops), OPSETS) for name, ops in functions.items()]
    graph = helper.make_graph(_chain(main), "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=9, functions=bodies)


def _doubling(levels: int) -> dict[str, list[str]]:
    return {f"f{i}": [f"f{i + 1}"] * 2 if i < levels - 1 else ["Neg"] for i in range(levels)}


@pytest.mark.parametrize("seed", range(8))
def test_the_count_is_that_of_the_calls_written_out(seed: int) -> None:
    draw = random.Random(seed)
    names = [f"f{index}" for index in range(6)]
    functions = {n: draw.choices(["Neg", *names[i + 1 :]], k=draw.randint(1, 3)) for i, n in enumerate(names)}
    shuffled = dict(draw.sample(list(functions.items()), len(functions)))
    model = _model(draw.choices(["Neg", *names], k=3), shuffled)
    flat = onnx.inliner.inline_local_functions(model)
    # A call is a node too, which writing out replaces.
    calls = _count_calls(model.graph.node, {function.name: function for function in model.functions})
    assert written_out(model).nodes == len(flat.graph.node) + calls


def _count_calls(nodes: list[onnx.NodeProto], functions: dict[str, onnx.FunctionProto]) -> int:
    return sum(1 + _count_calls(functions[n.op_type].node, functions) for n in nodes if n.op_type in functions)


def test_nodes_in_branches_count_and_so_do_calls_in_them() -> None:
    branch = helper.make_graph(_chain(["f", "f"])[1:], "branch", [], [])
    model = _model(["Neg"], {"f": ["Neg"] * 3})
    model.graph.node.append(helper.make_node("If", ["c"], ["d"], then_branch=branch, else_branch=branch))
    assert written_out(model) == Written(nodes=2 + 2 * (1 + 3), deep=1)


def test_functions_that_call_themselves_are_followed_once() -> None:
    assert written_out(_model(["f"], {"f": ["g", "Neg"], "g": ["f"]})).nodes == 4


@pytest.mark.parametrize(("levels", "deep"), [(34, 34), (5000, 5000)])
def test_many_calls_are_counted_without_following_each(levels: int, deep: int) -> None:
    nodes = min(3 * 2 ** (levels - 1) - 1, MANY)  # the call, two in every body but the last, one in that
    assert written_out(_model(["f0"], _doubling(levels))) == Written(nodes, deep)


@pytest.mark.parametrize(
    ("functions", "got"),
    [
        (_doubling(34), "25769803775 nodes, functions 34 deep"),
        ({f"f{i}": [f"f{i + 1}"] if i < 300 else ["Neg"] for i in range(301)}, "302 nodes, functions 301 deep"),
    ],
    ids=["many", "deep"],
)
def test_a_small_file_that_no_machine_could_hold_is_refused(
    tmp_path: Path, functions: dict[str, list[str]], got: str
) -> None:
    onnx.save(_model(["f0"], functions), tmp_path / "a.onnx")
    with pytest.raises(UnsafeInput) as error:
        verify(tmp_path / "a.onnx")
    assert error.value.got.startswith(got)
    assert str(LIMITS.nodes) in error.value.need


def test_a_model_at_the_limits_passes(tmp_path: Path) -> None:
    onnx.save(_model(["f0"], _doubling(4)), tmp_path / "a.onnx")
    verify(tmp_path / "a.onnx", Limits(nodes=23, calls=4))
    for limits in (Limits(nodes=22, calls=4), Limits(nodes=23, calls=3)):
        with pytest.raises(UnsafeInput):
            verify(tmp_path / "a.onnx", limits)
