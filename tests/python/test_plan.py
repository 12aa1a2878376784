# SPDX-License-Identifier: Apache-2.0
"""The proof that a plan holds our plugins fails when one is missing or has another attribute."""

from __future__ import annotations

import struct

import pytest
from python.attention_models import SCALE, flash_node, fused

from flash_trt import onnx_file, plan, shapes
from flash_trt.backends import Backend
from flash_trt.build import build_engine
from flash_trt.onnx_file import FlashNode

SECOND_SCALE = 0.77


@pytest.fixture(scope="module")
def built(rtx: Backend, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, tuple[FlashNode, ...]]:
    """The plan of two FlashAttention nodes that differ in scale and mask, and the nodes."""
    first = flash_node(output="half", name="first")
    second = flash_node(("half", "key", "value"), name="second", scale=SECOND_SCALE, causal=0)
    file = onnx_file.read(fused(tmp_path_factory.mktemp("plan") / "m.onnx", first, second))
    profile = shapes.plan_profiles(file.inputs, [])
    return build_engine(rtx, file, profile, ("sm80", "sm89")).data, file.flash_nodes


def test_every_plugin_is_read_back_with_its_attributes(built: tuple[bytes, tuple[FlashNode, ...]]) -> None:
    records = plan.plugin_records(built[0])
    assert [record.operator for record in records] == ["FlashAttention"] * 2
    scales = sorted(struct.unpack("<f", record.fields["scale"])[0] for record in records)
    assert scales == pytest.approx([SCALE, SECOND_SCALE])
    assert {record.fields["causal"] for record in records} == {struct.pack("<i", 0), struct.pack("<i", 1)}


def test_an_honest_plan_is_proven_by_its_fields(built: tuple[bytes, tuple[FlashNode, ...]]) -> None:
    assert plan.prove(*built) == plan.Proof("fields")


def test_a_node_missing_from_the_plan_is_named(built: tuple[bytes, tuple[FlashNode, ...]]) -> None:
    data, nodes = built
    proof = plan.prove(data, [*nodes, nodes[0]])
    assert proof.kind == "none"
    assert "lacks FlashAttention" in proof.problems[0]


def test_a_layer_that_tensorrt_keeps_twice_is_no_problem(built: tuple[bytes, tuple[FlashNode, ...]]) -> None:
    data, nodes = built
    assert plan.prove(data, nodes[:1]).kind == "fields"


def test_one_attribute_changed_in_the_plan_is_named(built: tuple[bytes, tuple[FlashNode, ...]]) -> None:
    data, nodes = built
    changed = data.replace(struct.pack("<f", SECOND_SCALE), struct.pack("<f", SECOND_SCALE * 1.01))
    assert changed != data
    problems = plan.prove(changed, nodes).problems
    assert f"scale {SECOND_SCALE}" in problems[0]
    assert "scale 0.7777" in problems[1]
    assert "that no node asks for" in problems[1]


@pytest.mark.parametrize("cut", [0, 1, 7, 40])
def test_a_plan_cut_short_is_never_read_past_its_end(built: tuple[bytes, tuple[FlashNode, ...]], cut: int) -> None:
    data, nodes = built
    at = data.rindex(plan._STRING + struct.pack("<Q", len("FlashAttention")))
    assert plan.prove(data[: at + cut], nodes).problems


def test_a_plan_in_an_unknown_form_is_held_to_the_names() -> None:
    nodes = [FlashNode("a", "FlashAttention", {}), FlashNode("b", "FlashAttention", {})]
    assert plan.prove(b"..FlashAttention..FlashAttention..", nodes).kind == "names"
    assert plan.prove(b"..FlashAttention..", nodes).problems == (
        "FlashAttention occurs 1 times in the plan, of 2 nodes",
    )
