# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import get_args

import numpy as np
import onnx_ir as ir
import pytest
from exporter.attention_pairs import Causal, Fault, Recipe, build, save_pair

from flash_export.check import CheckResult, NotProven, check
from flash_export.check_structure import BrokenRewrite
from flash_export.eager import Eager
from flash_export.errors import NumbersDiffer, UsageError
from flash_export.runtime import CannotRun, Session
from flash_export.sites import Site

FAULTS: tuple[Fault, ...] = get_args(Fault)
RECIPE_OF = {
    "causal_kind": Recipe(causal="bottom_right"),
    "mask_off_by_one": Recipe(causal="top_left"),
    "softcap_dropped": Recipe(softcap=5.0),
}
"""Where a fault needs something to break; the others break the plain recipe."""


def run(plain: Path, flash: Path, sites: list[Site], **changes: object) -> CheckResult:
    settings: dict = {"reference": None, "example": {}, "dims": {}, "values": None} | changes
    return check(plain, flash, sites, **settings)


def run_recipe(folder: Path, recipe: Recipe, **changes: object) -> CheckResult:
    return run(*save_pair(folder, recipe), **changes)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("causal", get_args(Causal))
def test_an_honest_rewrite_passes_at_every_site_and_setting(tmp_path: Path, dtype: str, causal: Causal) -> None:
    result = run_recipe(tmp_path, Recipe(sites=2, dtype=dtype, causal=causal))
    assert result.passed
    sites = [r for r in result.runs if r["kind"] == "site"]
    assert {(r["name"], r["passed"]) for r in sites} == {("attn0", True), ("attn1", True)}
    settings = ["b=3 s=67 t=41 seed=0", "b=1 s=1 t=19 seed=1", "b=2 s=131 t=197 seed=2"]
    assert {r["setting"] for r in sites} == {*settings, settings[0] + " masks=0,1"}
    assert all(2.0 <= r["score_spread"] <= 4.0 and r["reference"] == "float64" for r in sites)
    assert result.max_abs_error < result.tolerance < 2e-5


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_one_of_three_sites_is_caught_with_that_site_named(tmp_path: Path, fault: Fault, at: int) -> None:
    pair = save_pair(tmp_path, RECIPE_OF.get(fault, Recipe()), fault, at)
    with pytest.raises(NumbersDiffer) as caught:
        run(*pair)
    assert caught.value.where == f"site attn{at}"
    assert f"--skip attn{at}" in caught.value.do


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("fault", ["scale", "mask_off_by_one", "one_tile_wrong"])
def test_half_precision_hides_no_fault(tmp_path: Path, dtype: str, fault: Fault) -> None:
    recipe = dataclasses.replace(RECIPE_OF.get(fault, Recipe()), dtype=dtype)
    with pytest.raises(NumbersDiffer, match="site attn1"):
        run(*save_pair(tmp_path, recipe, fault))


def test_all_wrong_sites_are_named_at_once(tmp_path: Path) -> None:
    plain, flash, sites = save_pair(tmp_path, Recipe())
    broken = ir.load(flash)
    for node in broken.graph:
        if node.name in ("flash_context0", "flash_context2"):
            node.attributes["scale"] = ir.AttrFloat32("scale", 1.01 * node.attributes["scale"].as_float())
    ir.save(broken, flash)
    with pytest.raises(NumbersDiffer) as caught:
        run(plain, flash, sites)
    assert caught.value.where == "site attn0, attn2 of 3"


def test_the_error_has_its_five_parts_with_numbers_and_the_setting(tmp_path: Path) -> None:
    with pytest.raises(NumbersDiffer) as caught:
        run(*save_pair(tmp_path, Recipe(), "scale"))
    error = caught.value
    assert error.exit_code == 1
    assert "instead of" in error.got
    assert "b=3 s=67 t=41 seed=0" in error.got
    assert "at most" in error.need


def test_a_fault_outside_every_site_is_caught_by_the_whole_model(tmp_path: Path) -> None:
    plain, flash, sites = save_pair(tmp_path, Recipe())
    broken = ir.load(flash)
    weight = broken.graph.initializers["w_o1"]
    weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1.01), name="w_o1")
    ir.save(broken, flash)
    with pytest.raises(NumbersDiffer) as caught:
        run(plain, flash, sites)
    assert caught.value.where == "output output"
    assert "every site alone does" in caught.value.what


def test_static_shapes_and_one_batch_are_checked_on_several_seeds(tmp_path: Path) -> None:
    recipe = Recipe(sites=1, static=True, batch=1, causal="bottom_right")
    result = run_recipe(tmp_path, recipe)
    assert [r["setting"] for r in result.runs if r["kind"] == "site"] == [
        "seed=0", "seed=1", "seed=2", "seed=0 masks=0", "seed=0 masks=1",
    ]  # fmt: skip
    with pytest.raises(NumbersDiffer, match="site attn0"):
        run(*save_pair(tmp_path, recipe, "causal_kind", at=0))


def test_a_row_that_is_nan_only_in_the_reference_is_counted_and_must_be_finite(tmp_path: Path) -> None:
    """-inf without a guard: rows before the diagonal's start see no key, the unfused graph gives NaN, the node 0."""
    recipe = Recipe(sites=1, causal="bottom_right", guard=False, padded=False)
    result = run_recipe(tmp_path, recipe)
    by_setting = {r["setting"]: r["reference_is_nan"] for r in result.runs if r["kind"] == "site"}
    rows_without_keys = 67 - 41
    assert by_setting["b=3 s=67 t=41 seed=0"] == 3 * rows_without_keys * recipe.heads * recipe.head_dim
    assert by_setting["b=1 s=1 t=19 seed=1"] == 0


def test_a_model_that_gives_nothing_but_nan_proves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nan.onnx"
    ir.save(
        ir.from_onnx_text(
            """<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) <float zero = {0.0}>
            { z = Mul(x, zero)  y = Div(z, zero) }"""
        ),
        path,
    )
    finite = tmp_path / "finite.onnx"
    ir.save(
        ir.from_onnx_text('<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Tanh(x) }'),
        finite,
    )
    with pytest.raises(UsageError, match=r"nothing to compare with(\n.*)*each NaN or infinite"):
        run(path, finite, [])


def test_a_model_of_empty_tensors_proves_nothing(tmp_path: Path) -> None:
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[n, 0] x) => (float[n, 0] y) { y = Tanh(x) }'
    ir.save(ir.from_onnx_text(text), tmp_path / "empty.onnx")
    with pytest.raises(UsageError, match=r"nothing to compare with(\n.*)*without any element"):
        run(tmp_path / "empty.onnx", tmp_path / "empty.onnx", [])


def test_a_nan_that_the_model_makes_in_both_files_is_no_fault_of_the_rewrite(tmp_path: Path) -> None:
    half = '<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Sqrt(x) }'
    ir.save(ir.from_onnx_text(half), tmp_path / "half.onnx")
    result = run(tmp_path / "half.onnx", tmp_path / "half.onnx", [])
    assert any(r["reference_is_nan"] for r in result.runs)


def test_a_nan_of_the_fused_model_alone_fails(tmp_path: Path) -> None:
    guarded = save_pair(tmp_path, Recipe(sites=1, causal="bottom_right", padded=False))
    unguarded = tmp_path / "unguarded.onnx"
    ir.save(build(Recipe(sites=1, causal="bottom_right", padded=False, guard=False), fused=False), unguarded)
    with pytest.raises(NumbersDiffer, match="NaN where the reference is not"):
        run(guarded[0], unguarded, [])


def test_a_finite_fill_that_was_taken_for_minus_infinity_is_caught(tmp_path: Path) -> None:
    """Left padding and causal together: the one key that a first row sees is filled. finfo.min leaves V, -inf 0."""
    filled = Recipe(sites=1, causal="top_left", fill=float(np.finfo(np.float32).min))
    plain, flash, sites = save_pair(tmp_path, filled)
    assert run(plain, flash, sites).passed
    ir.save(build(dataclasses.replace(filled, fill=-np.inf), fused=True), flash)
    with pytest.raises(NumbersDiffer, match="site attn0"):
        run(plain, flash, sites)


def test_a_file_without_bodies_is_checked_all_the_same(tmp_path: Path) -> None:
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=1), "scale", at=0)
    bare = ir.load(flash)
    bare.functions.clear()
    ir.save(bare, flash)
    with pytest.raises(CannotRun):
        Session(bare, tmp_path)
    with pytest.raises(NumbersDiffer, match="site attn0"):
        run(plain, flash, sites)


def test_sites_that_are_not_fused_are_left_alone(tmp_path: Path) -> None:
    plain, _, sites = save_pair(tmp_path, Recipe(sites=1))
    sites[0].status = "refused"
    assert [r["kind"] for r in run(plain, plain, sites).runs] == ["model"] * 3


def test_a_site_that_cannot_be_cut_out_is_not_proven_and_a_fault_elsewhere_comes_first(tmp_path: Path) -> None:
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=2))
    sites[0].boundary = ("query0", "value0", "keep")
    with pytest.raises(NotProven) as caught:
        run(plain, flash, sites)
    assert caught.value.why.keys() == {"attn0"}
    assert "it cannot be run alone: " in caught.value.why["attn0"]
    assert "not properly bounded" in caught.value.why["attn0"]
    with pytest.raises(NumbersDiffer, match="site attn1"):
        run(plain, save_pair(tmp_path, Recipe(sites=2), "scale", at=1)[1], sites)


def test_inputs_that_would_hide_a_wrong_scale_prove_nothing(tmp_path: Path) -> None:
    """Over one key the softmax is 1 whatever the scale. Every number is right, and says nothing."""
    recipe = Recipe(sites=2)
    pair = save_pair(tmp_path, recipe)
    assert run(*pair, dims={"t": (1, 2)}).passed
    for fault in (None, "scale"):
        with pytest.raises(NotProven, match=r"attn0: a scale that is 1 % off would not show(.*)attn1"):
            run(*save_pair(tmp_path, recipe, fault), dims={"t": (1, 1)})


def test_ranges_of_the_dims_are_kept(tmp_path: Path) -> None:
    result = run_recipe(tmp_path, Recipe(sites=1), dims={"s": (2, 40), "b": (2, 2)})
    settings = {str(r["setting"]) for r in result.runs if "masks" not in str(r["setting"])}
    assert settings == {"b=2 s=40 t=41 seed=0", "b=2 s=2 t=19 seed=1", "b=2 s=40 t=197 seed=2"}


def test_a_model_that_ends_early_is_checked_on_shorter_sequences_and_never_on_one_key_alone(tmp_path: Path) -> None:
    """32 positions: 67 and 131 do not run. A softmax over one key would hide any scale."""
    recipe = Recipe(sites=1, positions=32)
    settings = {r["setting"] for r in run_recipe(tmp_path, recipe).runs if "masks" not in str(r["setting"])}
    assert settings == {"b=3 s=9 t=5 seed=0", "b=1 s=1 t=19 seed=1", "b=2 s=17 t=25 seed=2"}
    with pytest.raises(NumbersDiffer, match="site attn0"):
        run(*save_pair(tmp_path, recipe, "scale", at=0))


BATCH_OF_ONE = """<ir_version: 9, opset_import: ["": 18]> g (float[b, s] x) => (float[b, s] y) <int64[2] one = {1, -1}>
{ row = Reshape(x, one)  shape = Shape(x)  same = Reshape(row, shape)  fits = Add(same, row)  y = Identity(fits) }"""


def test_a_model_that_runs_with_a_batch_of_one_alone_is_tried_so_at_every_length_and_the_user_is_told(
    tmp_path: Path,
) -> None:
    ir.save(ir.from_onnx_text(BATCH_OF_ONE), tmp_path / "one.onnx")
    result = run(tmp_path / "one.onnx", tmp_path / "one.onnx", [])
    assert {r["setting"] for r in result.runs} == {"b=1 s=67 seed=0", "b=1 s=1 seed=1", "b=1 s=131 seed=2"}
    (warning,) = result.warnings
    assert "with a batch of one only; with b=3 s=67 seed=0 it fails: " in warning


def test_a_model_that_takes_any_batch_is_tried_with_several_and_nothing_is_warned_of(tmp_path: Path) -> None:
    result = run_recipe(tmp_path, Recipe(sites=1))
    assert {str(r["setting"])[:3] for r in result.runs} == {"b=3", "b=1", "b=2"}
    assert result.warnings == []


def test_the_user_is_told_that_pytorch_ran_on_none_of_the_inputs(tmp_path: Path) -> None:
    def tired(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        raise RuntimeError("I am tired")

    plain, flash, sites = save_pair(tmp_path, Recipe(sites=1))
    (warning,) = run(plain, flash, sites, reference=tired).warnings
    assert warning == "not compared with PyTorch: eager PyTorch does not run: RuntimeError: I am tired"


def test_values_replace_drawn_inputs(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = tmp_path / "values.npz"
    inputs = {"x": rng.standard_normal((1, 7, 60)), "y": rng.standard_normal((1, 9, 60)), "keep": np.ones((1, 9), int)}
    np.savez(values, **{n: a.astype(np.float32) if n != "keep" else a for n, a in inputs.items()})
    assert {r["setting"] for r in run_recipe(tmp_path, Recipe(sites=1), values=values).runs} == {"values"}


def test_the_example_is_one_more_setting(tmp_path: Path) -> None:
    example = {
        "x": np.zeros((1, 5, 60), np.float32),
        "y": np.zeros((1, 3, 60), np.float32),
        "keep": np.array([[1, 1, 0]]),
    }
    result = run_recipe(tmp_path, Recipe(sites=1), example=example)
    assert "example" in {r["setting"] for r in result.runs}


PAIRED_LENGTHS = '<ir_version: 9, opset_import: ["": 18]> g (float[n] a, float[m] b) => (float[k] c) { c = Add(a, b) }'


def test_lengths_that_do_not_go_together_end_with_the_way_out_and_an_example_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "paired.onnx"
    ir.save(ir.from_onnx_text(PAIRED_LENGTHS), path)
    with pytest.raises(UsageError, match="--values"):
        run(path, path, [], dims={"n": (2, 9), "m": (11, 20)})
    pair = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    assert run(path, path, [], dims={"n": (2, 9), "m": (11, 20)}, example=pair).passed


def test_eager_pytorch_is_one_more_judge(tmp_path: Path) -> None:
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=1))
    session = Session(ir.load(plain), tmp_path)
    assert run(plain, flash, sites, reference=session.run).passed
    with pytest.raises(NumbersDiffer, match="what the PyTorch model does"):
        run(plain, flash, sites, reference=lambda feeds: [1.001 * session.run(feeds)[0]])


@pytest.mark.parametrize(("times", "measured", "passes"), [(1.3, True, True), (1.3, False, False), (3.0, True, False)])
def test_eager_pytorch_may_round_more_than_the_graph_where_it_is_measured_to(
    tmp_path: Path, times: float, measured: bool, passes: bool
) -> None:
    """``times`` the tolerance off, while a float64 run of its own is right."""
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=1))
    session = Session(ir.load(plain), tmp_path)
    runs = [r for r in run(plain, flash, sites, reference=session.run).runs if r.get("against") == "eager"]
    tolerance = {r["setting"]: r["tolerance"] for r in runs}
    batches = {int(str(setting)[2]): allowed for setting, allowed in tolerance.items()}

    def coarse(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        (output,) = session.run(feeds)
        sign = np.where(np.arange(output.size).reshape(output.shape) % 211 == 0, 1, 0)
        return [output + np.float32(times * batches[len(output)]) * sign.astype(np.float32)]

    def in_float64(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        if not measured:
            raise TypeError("written for float32")
        return session.run(feeds)

    with contextlib.nullcontext() if passes else pytest.raises(NumbersDiffer, match="PyTorch"):
        assert run(plain, flash, sites, reference=Eager(coarse, in_float64)).passed


@pytest.mark.parametrize(("dtype", "roundoff"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_eager_pytorch_in_half_precision_may_round_as_its_type_does(
    tmp_path: Path, dtype: str, roundoff: float
) -> None:
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=1, dtype=dtype))
    exact = Session(build(Recipe(sites=1), fused=False), tmp_path)

    def rounded(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        assert feeds["x"].dtype.itemsize == 2
        return [x * np.float32(1 + roundoff) for x in exact.run(feeds)]

    assert run(plain, flash, sites, reference=rounded).passed
    with pytest.raises(NumbersDiffer, match="PyTorch"):
        run(plain, flash, sites, reference=lambda feeds: [-x for x in rounded(feeds)])


def test_eager_pytorch_that_does_not_run_on_drawn_inputs_is_said_so(tmp_path: Path) -> None:
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=1))
    session = Session(ir.load(plain), tmp_path)

    def short_sequences_only(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        if feeds["x"].shape[1] > 100:
            raise RuntimeError("at most 100 positions")
        return session.run(feeds)

    result = run(plain, flash, sites, reference=short_sequences_only)
    eager = {r["setting"]: (r["passed"], r["note"]) for r in result.runs if r.get("against") == "eager"}
    assert eager["b=3 s=67 t=41 seed=0"] == (True, None)
    assert eager["b=2 s=131 t=197 seed=2"] == (None, "eager PyTorch does not run: RuntimeError: at most 100 positions")


def test_progress_names_the_steps_and_counts_every_site(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    run_recipe(tmp_path, Recipe(sites=2), progress=lambda *step: told.append(step))
    assert list(dict.fromkeys(step for step, _, _ in told)) == ["structure", "unfused model", "sites", "fused model"]
    assert [t for t in told if t[0] == "sites"] == [("sites", 0, 2), ("sites", 1, 2), ("sites", 2, 2)]


def test_the_report_is_plain_json_and_the_same_every_time(tmp_path: Path) -> None:
    first, second = (run_recipe(tmp_path, Recipe(sites=1, guard=False)).as_report() for _ in range(2))
    assert json.loads(json.dumps(first, allow_nan=False)) == json.loads(json.dumps(second, allow_nan=False))
    assert first["passed"] is True


def test_the_files_are_read_only_and_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=1), "scale", at=0)
    before = plain.read_bytes(), flash.read_bytes()
    with pytest.raises(NumbersDiffer):
        run(plain, flash, sites)
    assert (plain.read_bytes(), flash.read_bytes()) == before
    assert not list(scratch.iterdir())


def test_a_broken_file_is_our_own_bug_and_not_a_difference_of_numbers(tmp_path: Path) -> None:
    plain, flash, sites = save_pair(tmp_path, Recipe(sites=1))
    broken = ir.load(flash)
    node = next(n for n in broken.graph if n.op_type == "FlashAttentionEx")
    del node.attributes["softcap"]
    ir.save(broken, flash)
    with pytest.raises(BrokenRewrite, match=r"flash_context0.*softcap"):
        run(plain, flash, sites)
