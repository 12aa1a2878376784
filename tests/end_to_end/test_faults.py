# SPDX-License-Identifier: Apache-2.0
"""A rewrite that is wrong at one attention never gets out: the whole pipeline runs, with a fault put into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from exporter.attention_pairs import Recipe, build

from flash_export import pipeline
from flash_export.cut import attention_nodes
from flash_export.errors import NumbersDiffer
from flash_export.function_body import functions_for
from flash_export.options import Options

SITES = 3
Fault = Callable[[ir.Model, ir.Node], None]


def set_attribute(node: ir.Node, name: str, value: int | float) -> None:
    node.attributes[name] = ir.AttrFloat32(name, value) if name == "scale" else ir.AttrInt64(name, int(value))


def constant(model: ir.Model, array: np.ndarray, name: str) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    model.graph.initializers[name] = value
    return value


def scale_off_by_one_percent(model: ir.Model, node: ir.Node) -> None:
    set_attribute(node, "scale", 1.01 * node.attributes["scale"].as_float())


def causal_kind_flipped(model: ir.Model, node: ir.Node) -> None:
    assert node.attributes["causal"].as_int() == 1
    set_attribute(node, "diagonal", 1 - node.attributes["diagonal"].as_int())


def mask_off_by_one(model: ir.Model, node: ir.Node) -> None:
    assert node.attributes["causal"].as_int() == 1
    set_attribute(node, "causal", 0)
    set_attribute(node, "window_right", 1)


def mask_lost(model: ir.Model, node: ir.Node) -> None:
    assert node.attributes["has_bias"].as_int() == 1
    set_attribute(node, "has_bias", 0)


def key_and_value_swapped(model: ir.Model, node: ir.Node) -> None:
    key, value = node.inputs[1:3]
    node.replace_input_with(1, value)
    node.replace_input_with(2, key)


def heads_permuted(model: ir.Model, node: ir.Node) -> None:
    heads, dim = node.attributes["q_num_heads"].as_int(), Recipe().head_dim
    columns = np.roll(np.arange(heads * dim), dim)
    turned = ir.node("Gather", [node.inputs[0], constant(model, columns, "columns")], {"axis": 2})
    turned.outputs[0].name = "turned_heads"
    node.prepend(turned)
    node.replace_input_with(0, turned.outputs[0])


def one_tile_lost(model: ir.Model, node: ir.Node) -> None:
    node.replace_input_with(4, constant(model, np.array([64], np.int32), "first_tile"))
    set_attribute(node, "has_kv_lengths", 1)


CAUSAL = Recipe(sites=SITES, causal="bottom_right")
PADDED = Recipe(sites=SITES)
FAULTS: dict[Fault, Recipe] = {
    scale_off_by_one_percent: PADDED,
    causal_kind_flipped: CAUSAL,
    mask_off_by_one: CAUSAL,
    mask_lost: PADDED,
    key_and_value_swapped: PADDED,
    heads_permuted: PADDED,
    one_tile_lost: PADDED,
}


def options(folder: Path, recipe: Recipe, **changes: object) -> Options:
    source = folder / "model.onnx"
    ir.save(build(recipe, fused=False), source)
    return Options(source=source, output=folder / "out" / "fused.onnx", quiet=True, **changes)


def seed_fault(monkeypatch: pytest.MonkeyPatch, fault: Fault, at: int) -> None:
    """From now on the pipeline's rewrite leaves ``fault`` in the ``at``-th attention."""
    honest = pipeline.rewrite

    def rewrite(model: ir.Model, sites: list, *, fallback: bool = True) -> int:
        count = honest(model, sites, fallback=fallback)
        nodes = attention_nodes(model)
        fault(model, nodes[at])
        for function in functions_for(nodes, 18):
            model.functions[function.identifier()] = function
        return count

    monkeypatch.setattr(pipeline, "rewrite", rewrite)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_in_one_attention_names_it_and_publishes_nothing(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    asked = options(tmp_path, FAULTS[fault])
    names = [site.name for site in pipeline.run(options(tmp_path, FAULTS[fault], dry_run=True)).sites]
    assert len(names) == SITES
    seed_fault(monkeypatch, fault, at=1)
    with pytest.raises(NumbersDiffer) as caught:
        pipeline.run(asked)
    assert caught.value.where == f"site {names[1]}"
    assert caught.value.exit_code == 1
    assert not list((tmp_path / "out").iterdir())


def test_the_advice_of_the_error_works(tmp_path: Path) -> None:
    """``--skip SITE`` leaves one attention as it was, and the rest is proven and published."""
    (tmp_path / "out").mkdir()
    name = pipeline.run(options(tmp_path, PADDED, dry_run=True)).sites[SITES - 1].name
    result = pipeline.run(options(tmp_path, PADDED, skip=(name,)))
    assert [site.status for site in result.sites] == ["fused", "fused", "refused"]
    operators = [node.op_type for node in ir.load(tmp_path / "out" / "fused.onnx").graph]
    assert operators.count("Softmax") == 1


def test_without_a_fault_every_attention_is_proven_and_reported(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = pipeline.run(options(tmp_path, CAUSAL))
    check = result.report["check"]
    assert check["passed"] is True
    sites = {run["name"] for run in check["runs"] if run["kind"] == "site" and run["passed"]}
    assert sites == {site.name for site in result.sites}
    assert all(site.attributes.causal_kind == "bottom_right" for site in result.sites)
