# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.attention_pairs import Recipe, build, site_of

from flash_export import accept, pipeline, runtime
from flash_export import check_site as check_site_module
from flash_export.boundary import Boundary, ScoreMeter, read_boundary
from flash_export.check_site import CannotProve, SiteRun, check_site, roundings, stretch
from flash_export.cut import CannotCut, cut, reaches
from flash_export.function_body import functions_for
from flash_export.op import DOMAIN, Attributes
from flash_export.options import Options
from flash_export.sites import Site
from flash_export.talk import Talk

RECIPE = Recipe(sites=2)
SHAPES = {"query0": (2, 7, 60), "key0": (2, 9, 60), "value0": (2, 9, 60)}


def seen(**changes: object) -> dict[str, dict]:
    keep = np.ones((2, 9), np.int64)
    keep[1, :4] = 0
    return {"a trial": {**SHAPES, "keep": keep, **changes}}


def run_site(recipe: Recipe, folder: Path, seed: int = 0, **changes: object) -> list[SiteRun]:
    plain, flash = build(recipe, fused=False), build(recipe, fused=True)
    return alone(typed(site_of(recipe, 0), plain, flash), plain, flash, seen(**changes), folder, seed)


def alone(site: Site, plain: ir.Model, flash: ir.Model, seen: dict, folder: Path, seed: int = 0) -> list[SiteRun]:
    return check_site(site, read_boundary(site, plain, flash), plain, flash, seen, folder, seed)


def typed(site: Site, *models: ir.Model) -> Site:
    """Gives the boundary its types, as ``check`` does."""
    for model in models:
        values = ir.convenience.create_value_mapping(model.graph)
        for name in site.boundary:
            values[name].type = values[name].type or ir.TensorType(ir.DataType.FLOAT)
    return site


def packed(scale: float) -> tuple[ir.Model, Site]:
    """One FlashAttentionPacked node: 4 query heads, 2 key heads, head dim 6."""
    attributes = Attributes(q_num_heads=4, kv_num_heads=2, scale=scale)
    qkv = ir.Value(name="qkv", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "s", 48]))
    node = ir.node("FlashAttentionPacked", [qkv], attributes.as_dict(), domain=DOMAIN)
    node.outputs[0].name = "o"
    node.outputs[0].type, node.outputs[0].shape = qkv.type, ir.Shape(["b", "s", 24])
    graph = ir.Graph([qkv], node.outputs, nodes=[node], opset_imports={"": 18, DOMAIN: 1}, name="packed")
    model = ir.Model(graph, ir_version=9, functions=functions_for([node], 18))
    return model, Site("packed", "fused", attributes=attributes, output="o", boundary=("qkv",))


def test_query_key_and_value_are_drawn_and_masks_keep_their_content() -> None:
    plain, flash = build(RECIPE, fused=False), build(RECIPE, fused=True)
    boundary = read_boundary(typed(site_of(RECIPE, 0), plain, flash), plain, flash)
    assert set(boundary.drawn) == {"query0", "key0", "value0"}
    assert boundary.captured == ("keep",)
    assert (boundary.stretched, boundary.squared) == (("query0",), False)


def test_a_boundary_that_does_not_bound_is_said_so() -> None:
    plain, flash = build(RECIPE, fused=False), build(RECIPE, fused=True)
    site = dataclasses.replace(site_of(RECIPE, 0), boundary=("query0", "key0", "keep"))
    with pytest.raises(CannotCut, match="y"):
        read_boundary(typed(site, plain, flash), plain, flash)
    with pytest.raises(CannotCut, match="no_such_value"):
        cut(flash, ["no_such_value"], ["context0"])


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_scores_are_stretched_to_a_spread_of_three(magnitude: float, tmp_path: Path) -> None:
    plain, flash = build(RECIPE, fused=False), build(RECIPE, fused=True)
    site = typed(site_of(RECIPE, 0), plain, flash)
    boundary = read_boundary(site, plain, flash)
    meter = ScoreMeter(site, boundary, flash, tmp_path)
    rng = np.random.default_rng(0)
    feeds = {n: (magnitude * rng.standard_normal(s)).astype(np.float32) for n, s in SHAPES.items()}
    stretched, spread = stretch(feeds, boundary, meter)
    assert spread is not None
    assert 2.0 <= spread <= 4.0
    heads = [stretched[n].reshape(2, -1, 3, 20).transpose(0, 2, 1, 3) for n in ("query0", "key0")]
    scores = heads[0] @ heads[1].swapaxes(-1, -2) * 20**-0.5
    assert scores.std() == pytest.approx(spread, rel=1e-3)
    assert np.array_equal(stretched["value0"], feeds["value0"])


def test_a_packed_projection_is_stretched_by_the_root(tmp_path: Path) -> None:
    model, site = packed(scale=0.01)
    boundary = read_boundary(site, model, model)
    assert (boundary.stretched, boundary.squared) == (("qkv",), True)
    feeds = {"qkv": np.random.default_rng(0).standard_normal((2, 9, 48)).astype(np.float32)}
    _, spread = stretch(feeds, boundary, ScoreMeter(site, boundary, model, tmp_path))
    assert spread is not None
    assert 2.0 <= spread <= 4.0


def test_scores_that_nothing_stretches_end_the_search(tmp_path: Path) -> None:
    class Stubborn(ScoreMeter):
        def __init__(self) -> None:
            self.asked = 0

        def measure(self, feeds: object) -> float | None:
            self.asked += 1
            return 0.25

    meter = Stubborn()
    _, spread = stretch({"q": np.ones(3, np.float32)}, Boundary(("q",), (), ("q",), False), meter)
    assert spread == 0.25
    assert meter.asked < 10


def test_an_honest_site_passes_on_another_seed_with_other_numbers(tmp_path: Path) -> None:
    first, second = (run_site(RECIPE, tmp_path, seed)[0] for seed in (0, 1))
    assert first.verdict.passed
    assert second.verdict.passed
    assert first.verdict.max_abs_error != second.verdict.max_abs_error


EMPTY = {**SHAPES, "keep": np.ones((2, 0), np.int64), "key0": (2, 0, 60), "value0": (2, 0, 60)}
ONE_KEY = {**SHAPES, "keep": np.ones((2, 1), np.int64), "key0": (2, 1, 60), "value0": (2, 1, 60)}
ONE_VISIBLE = {**SHAPES, "keep": np.eye(2, 9, dtype=np.int64)}


@pytest.mark.parametrize("weak", [EMPTY, ONE_KEY, ONE_VISIBLE], ids=["no key", "one key", "one visible key"])
def test_inputs_that_show_no_fault_prove_nothing_alone_and_are_no_problem_among_others(weak, tmp_path: Path) -> None:
    plain, flash = build(RECIPE, fused=False), build(RECIPE, fused=True)
    site = typed(site_of(RECIPE, 0), plain, flash)
    with pytest.raises(CannotProve, match="a scale that is 1 % off would not show"):
        alone(site, plain, flash, {"weak": weak}, tmp_path)
    runs = alone(site, plain, flash, {"weak": weak} | seen(), tmp_path)
    assert [(run.trial, run.verdict.passed) for run in runs] == [("weak", True), ("a trial", True)]


def test_a_scale_that_is_off_by_one_percent_is_far_outside_the_tolerance(tmp_path: Path) -> None:
    plain, flash = build(RECIPE, fused=False), build(RECIPE, fused=True, fault="scale", at=0)
    (run,) = alone(typed(site_of(RECIPE, 0), plain, flash), plain, flash, seen(), tmp_path)
    assert run.verdict.max_abs_error > 1000 * run.verdict.tolerance


def test_a_node_that_does_not_run_fails_with_the_reason(tmp_path: Path) -> None:
    plain, flash = build(RECIPE, fused=False), build(RECIPE, fused=True)
    bias = next(n for n in flash.graph if n.op_type == "FlashAttentionEx").inputs[3].producer()
    bias.inputs[0].producer().inputs[0].producer().inputs[1].const_value = ir.tensor(np.array([0, 1]))
    (run,) = alone(typed(site_of(RECIPE, 0), plain, flash), plain, flash, seen(), tmp_path)
    assert "does not run" in run.verdict.why


def test_what_gives_only_a_shape_is_not_reached() -> None:
    graph = ir.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 9, opset_import: ["": 18]>
            g (float[n,4] x, float[m,4] y) => (float[n,4] z) { s = Shape(y) r = Reshape(x, s) z = Exp(r) }"""
        )
    ).graph
    assert reaches(graph.outputs[0]) == {"x"}


def test_operands_of_which_one_is_computed_from_the_other_are_not_drawn_apart(tmp_path: Path) -> None:
    """Values are half of the keys' source and the keys are those values, whose half goes into the node's scale."""
    body = "half_k = Mul (k, half)\n kt = Transpose <perm = [0, 1, 3, 2]> (half_k)\n s = MatMul (q, kt)\n"
    body += "probs = Softmax <axis = -1> (s)\n out = MatMul (probs, half_k)\n"
    proto = graphs.model(body, constants=graphs.CONSTANTS + ", float half = {0.5}")
    onnx.save(proto, tmp_path / "in.onnx")
    result = pipeline.run(Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx"), Talk(quiet=True))
    (site,) = result.sites
    assert site.status == "fused"
    assert (site.query_source, site.key_source) == ("q", "k")
    assert "half_k" not in site.boundary


def test_the_rounding_of_a_large_site_is_measured_less_often_the_more_trials_there_are() -> None:
    large = accept.ENOUGH_NUMBERS
    assert [roundings(large, trials) for trials in (1, 2, 3, 4)] == [3, 2, 1, 1]
    assert [roundings(size, 3) for size in (large - 1, 2**14, 2**13, 0)] == [4, 4, 8, 8]


def test_each_measurement_of_rounding_is_one_run_in_each_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = runtime.Session.run

    def counted(session: runtime.Session, feeds: object, outputs: object = None) -> list[np.ndarray]:
        ran.append(str(session._session.get_inputs()[0].type))
        return run(session, feeds, outputs)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime.Session, "run", counted)
    monkeypatch.setattr(check_site_module, "roundings", lambda size, trials: 3)
    run_site(RECIPE, tmp_path)
    assert ran.count("tensor(double)") == 3


def single_key(folder: Path, *, keys: str, probs: str = "probs = Softmax <axis = -1> (scaled)\n") -> Site:
    """The only site after an export of attention over ``keys`` keys, checked where there is one."""
    inputs = f"float[B, 4, S, 8] q, float[B, 4, {keys}, 8] k, float[B, 4, {keys}, 8] v"
    constants = graphs.CONSTANTS + ", int64[1] last = {-1}"
    body = graphs.PRODUCT + probs + "out = MatMul (probs, v)\n"
    onnx.save(graphs.model(body, inputs=inputs, constants=constants), folder / "in.onnx")
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((2, 4, s, 8)).astype(np.float32) for n, s in (("q", 5), ("k", 1), ("v", 1))}
    np.savez(folder / "values.npz", **arrays)
    options = Options(source=folder / "in.onnx", output=folder / "out.onnx", values=folder / "values.npz")
    (site,) = pipeline.run(options, Talk(quiet=True)).sites
    return site


SINK = (
    "shape = Shape (scaled)\n rows = Slice (shape, ax0, ax3)\n full = Concat <axis = 0> (rows, one)\n"
    "sink = Constant <value = float[1, 4, 1, 1] {0.5, 0.25, -1.0, 0.0}> ()\n"
    "column = Expand (sink, full)\n wide = Concat <axis = -1> (scaled, column)\n"
    "both = Softmax <axis = -1> (wide)\n probs = Slice (both, ax0, last, ax3)\n"
).replace("one)", "ax1)")


def test_over_the_only_key_that_a_graph_ever_has_no_scale_is_wrong(tmp_path: Path) -> None:
    site = single_key(tmp_path, keys="1")
    assert (site.status, site.keys) == ("fused", 1)


def test_over_one_key_of_any_number_nothing_is_proven(tmp_path: Path) -> None:
    site = single_key(tmp_path, keys="T")
    assert (site.keys, site.reason and site.reason.code) == (None, "not_proven")


def test_beside_a_sink_the_scale_of_the_only_key_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert single_key(tmp_path, keys="1", probs=SINK).status == "fused"
    monkeypatch.setattr(check_site_module, "SEEDED_FAULT", 1.0)
    site = single_key(tmp_path, keys="1", probs=SINK)
    assert site.reason is not None
    assert site.reason.code == "not_proven"
