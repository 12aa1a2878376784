# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import onnx_ir as ir
import pytest
from exporter.attention_pairs import Fault, Recipe, save_pair
from exporter.graphs import sites_checked
from exporter.test_check import RECIPE_OF, run

from flash_export.boundary import read_boundary
from flash_export.captured import Seen
from flash_export.same_site import identity
from flash_export.sites import Site

KEEP = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]])


def identities(plain: Path, flash: Path, sites: list[Site], keeps: list[np.ndarray]) -> list[bytes | None]:
    """Of each site with its own mask; what is drawn has the same lengths everywhere."""
    models = [ir.load(path) for path in (plain, flash)]
    found = []
    for site, keep in zip(sites, keeps, strict=True):
        boundary = read_boundary(site, *models)
        seen: Seen = dict.fromkeys(boundary.drawn, (2, 5, 60)) | dict.fromkeys(boundary.captured, keep)
        found.append(identity(site, boundary, models[0], models[1], {"one": seen}))
    return found


def test_layers_are_the_same_but_for_names(tmp_path: Path) -> None:
    first, *others = identities(*save_pair(tmp_path, Recipe(sites=4)), [KEEP] * 4)
    assert first is not None
    assert others == [first] * 3


@pytest.mark.parametrize("fault", get_args(Fault))
def test_a_layer_with_a_fault_is_another(fault: Fault, tmp_path: Path) -> None:
    first, second, third = identities(*save_pair(tmp_path, RECIPE_OF.get(fault, Recipe()), fault, 1), [KEEP] * 3)
    assert first == third != second


@pytest.mark.parametrize(
    "other", [1 - KEEP, KEEP.astype(np.int32), KEEP[:1], KEEP.reshape(5, 2)], ids=["content", "type", "batch", "shape"]
)
def test_a_layer_with_another_mask_is_another(other: np.ndarray, tmp_path: Path) -> None:
    first, second = identities(*save_pair(tmp_path, Recipe(sites=2)), [KEEP, other])
    assert None not in (first, second)
    assert first != second


def test_one_with_a_large_mask_or_one_that_comes_later_is_told_apart_from_none(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, Recipe(sites=2))
    assert identities(*pair, [np.zeros((2, 2**17)), KEEP])[0] is None
    late: list = [lambda: KEEP, KEEP]
    assert identities(*pair, late)[0] is None


@pytest.mark.parametrize(("tables", "same"), [((1.5, 1.5), True), ((1.5, 1.25), False)])
def test_weights_inside_count(tables: tuple[float, float], same: bool, tmp_path: Path) -> None:
    """A bias of each layer's own, as of distances, lies inside its boundary."""
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=2, fill=-1e4))
    for path in (plain, flash):
        model = ir.load(path)
        for i, number in enumerate(tables):
            site = sites[i]
            values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
            end = values[site.output]
            table = ir.Value(name=f"table{i}", const_value=ir.tensor(np.full(60, number, np.float32)))
            model.graph.register_initializer(table)
            added = ir.node("Mul", [end, table])
            end.replace_all_uses_with(added.outputs[0], replace_graph_outputs=True)
            added.replace_input_with(0, end)
            end.producer().append(added)
            added.outputs[0].name, end.name = end.name, f"{end.name}/before"
            added.outputs[0].type = end.type
        ir.save(model, path)
    first, second = identities(plain, flash, sites, [KEEP] * 2)
    assert (first == second) == same


def test_layers_that_are_the_same_are_run_once_and_reported_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sites_checked(monkeypatch)
    result = run(*save_pair(tmp_path, Recipe(sites=3)))
    assert asked == ["attn0"]
    runs = [r for r in result.runs if r["kind"] == "site"]
    by_name = {name: [r | {"name": ""} for r in runs if r["name"] == name] for name in ("attn0", "attn1", "attn2")}
    assert by_name["attn0"]
    assert by_name["attn0"] == by_name["attn1"] == by_name["attn2"]
