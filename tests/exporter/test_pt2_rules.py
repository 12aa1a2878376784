# SPDX-License-Identifier: Apache-2.0
"""Strings that PyTorch writes pass; strings that could become code do not."""

from __future__ import annotations

import json

import pytest

from flash_export import pt2_rules
from flash_export.pt2_rules import Forbidden

SIZES = [
    "Symbol('s77', positive=True, integer=True)",
    "Mul(Integer(48), Symbol('s27', positive=True, integer=True))",
    "Add(Integer(-1), Symbol('s0', integer=True))",
    "Pow(Symbol('s0', positive=True, integer=True), Integer(2))",
    "Max(Integer(1), FloorDiv(Symbol('s0', integer=True), Integer(8)))",
    "GreaterThan(Symbol('u0', integer=True), Integer(0))",
    "StrictLessThan(Symbol('s0', integer=True), Integer(512))",
    "s0//2 + 1",
    "true",
    "TruncToInt(Float('0.5', precision=53))",
]


@pytest.mark.parametrize("text", [s for s in SIZES if "Float(" not in s])
def test_a_size_as_pytorch_writes_it_passes(text: str) -> None:
    pt2_rules.check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Symbol('s0').__class__",
        "Symbol('s0', integer=exec('1'))",
        "Symbol('s0', cls=Symbol)",
        "Symbol(\"__import__('os')\")",
        "Integer(__import__('os'))",
        "lambda: 0",
        "[s0 for s0 in (1,)]",
        "Integer('1')",
        "eval('1')",
        "s0 if s0 else s1",
        "f'{s0}'",
        "(s0 := 1)",
        "sympify('1')",
        "S('1')",
        "s0!",
        "Pow(Integer(10), Integer(1000000000))",
        "Pow(Pow(Integer(64), Integer(64)), Integer(64))",
        "LShift(Integer(1), Integer(1000000))",
        "2**1000000000",
        "Integer(99999999999999999999999999)",
        "Mul(" + "Add(" * 200 + "s0" + ")" * 201,
        "(" * 3000 + "s0" + ")" * 3000,
        "s0 + " * 1000 + "s0",
        "s\u0660",
        "",
    ],
)
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(Forbidden):
        pt2_rules.check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.ops.aten.add.Tensor",
        "torch.ops.aten.sym_size.int",
        "_operator.mul",
        "torch.sym_max",
        "math.trunc",
        "torch.ops.aten.__and__.Tensor",
        "torch.ops.aten.__ilshift__.Scalar",
    ],
)
def test_a_tensor_operator_passes(text: str) -> None:
    pt2_rules.check_operator(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.os.system",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save",
        "torch.ops.aten.__class__",
        "torch.ops.aten.__init__.Tensor",
        "torch.ops.prims.__and__.Tensor",
        "torch.ops.aten.add.__class__",
        "torch.ops.aten.__and__.__class__",
        "torch.ops.load_library",
        "torch.ops.aten.add.Tensor.__globals__",
        "_operator.methodcaller",
        "_operator.attrgetter",
        "math.__loader__.load_module",
        "#namespace:op",
        "torch.hub.load",
        "torch.ops.higher_order.triton_kernel_wrapper_mutation",
        "",
    ],
)
def test_any_other_target_is_no_operator(text: str) -> None:
    with pytest.raises(Forbidden):
        pt2_rules.check_operator(text)


@pytest.mark.parametrize(
    "text", ["L['mask'].size()[0] == L['x'].size()[1]", "Eq(Mod(L['x'].size()[1], 8), 0)", "2 <= L['a.b'].size()[0]"]
)
def test_a_guard_on_sizes_passes(text: str) -> None:
    pt2_rules.check_guard(text)


def test_a_guard_of_many_parts_passes_and_one_of_more_does_not() -> None:
    """Windows of a grid have products of sizes in each of their guards."""
    size = "L['x'].size()[0]"
    pt2_rules.check_guard(f"{' + '.join([size] * 100)} == 3")
    with pytest.raises(pt2_rules.Forbidden):
        pt2_rules.check_guard(f"{'+'.join(['1'] * 2040)} == 3")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "L['x'].__class__",
        "L.__init__",
        "open('x')",
        "L['x'].size()[0] == 1 or exit()",
        "[1 for _ in L]",
        "L[\"x'] + __import__('os') + L['x\"]",
    ],
)
def test_any_other_guard_is_refused(text: str) -> None:
    with pytest.raises(Forbidden):
        pt2_rules.check_guard(text)


def tree(kind: object, context: object = "null", children: list | None = None) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": children or []}])


@pytest.mark.parametrize(
    "text",
    [
        tree(None, None),
        tree("builtins.tuple"),
        tree("builtins.dict", '["x", "y"]', [json.loads(tree(None, None))[1]] * 2),
        tree("transformers.modeling_outputs.BaseModelOutput", '["last_hidden_state"]'),
        "",
    ],
)
def test_plain_containers_pass(text: str) -> None:
    pt2_rules.check_tree(text)


@pytest.mark.parametrize(
    "text",
    [
        tree("collections.defaultdict", {"default_factory_module": "os"}),
        tree("collections.namedtuple", '"os.stat_result"'),
        tree("builtins.dict", '["x): pass\\nimport os\\ndef f("]'),
        tree("builtins.tuple", "null", [{"type": "evil.Class", "context": "null", "children_spec": []}]),
        "[2, {}]",
        "not json",
        "[" * 100000,
    ],
)
def test_any_other_container_is_refused(text: str) -> None:
    with pytest.raises(Forbidden):
        pt2_rules.check_tree(text)


@pytest.mark.parametrize(
    "document",
    [
        {"unheard_of": "text"},
        {"name": "a b"},
        {"nodes": [{"name": "x\n"}]},
        {"key with spaces": 1},
        {"as_custom_obj": {"name": "a"}},
        {"custom_obj_values": {"a": {"name": "b"}}},
        {"tensor_values": {"metadata": {"sizes": [{"as_expr": {"expr_str": "1"}}]}}},
        {"path_name": "../../etc/passwd"},
        {"a": [[[[]]]] * 2, "type": "CUDA:0"},
    ],
)
def test_a_document_is_refused_for_one_string(document: dict) -> None:
    with pytest.raises(Forbidden):
        pt2_rules.check_document(document)


@pytest.mark.parametrize("size", ["4*s79", "s0*s1", "2*s0 + 1", "s79", "s0 - 1", "(s0//2)"])
def test_a_range_may_be_of_a_computed_size(size: str) -> None:
    pt2_rules.check_document({"range_constraints": {size: {"min_val": 4, "max_val": 120}}})


@pytest.mark.parametrize("size", ["__import__('os').system('true')*4", "4*s79.real", "[s0]", "4*open", "9**9**9", "4*"])
def test_a_range_of_anything_else_is_refused(size: str) -> None:
    with pytest.raises(Forbidden):
        pt2_rules.check_document({"range_constraints": {size: {"min_val": 4, "max_val": 120}}})


def test_a_computed_size_is_a_key_of_nothing_but_ranges() -> None:
    with pytest.raises(Forbidden, match="a key under"):
        pt2_rules.check_document({"tensor_values": {"4*s79": 1}})


def test_a_document_nested_without_end_is_refused() -> None:
    document: list = []
    for _ in range(1000):
        document = [document]
    with pytest.raises(Forbidden, match="nested"):
        pt2_rules.check_document(document)
