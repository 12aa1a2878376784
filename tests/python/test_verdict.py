# SPDX-License-Identifier: Apache-2.0
"""The verdict covers every output of both sides, and no NaN, infinity or missing output passes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flash_trt.verdict import OutputVerdict, RunOutputs, judge_runs

RNG = np.random.default_rng(20)
WIDE = RNG.standard_normal((2, 67, 31))
BASE = WIDE.astype(np.float32)
ROUNDING = 3e-7


def _base(seed: int = 1) -> np.ndarray:
    return (WIDE * (1 + ROUNDING * np.random.default_rng(seed).standard_normal(WIDE.shape))).astype(np.float32)


def _judge(fused: np.ndarray, base: np.ndarray, wide: np.ndarray | None = WIDE) -> OutputVerdict:
    run = RunOutputs("run", {"y": fused}, {"y": base}, None if wide is None else {"y": wide})
    (verdict,) = judge_runs([run])
    return verdict


def test_the_same_rounding_passes() -> None:
    assert _judge(_base(2), _base(1)).passed


def test_three_times_the_rounding_fails() -> None:
    far = (WIDE * (1 + 6 * ROUNDING * np.random.default_rng(3).standard_normal(WIDE.shape))).astype(np.float32)
    verdict = _judge(far, _base(1))
    assert verdict.kind == "differs"
    assert verdict.max_abs_error > verdict.tolerance > 0


def test_a_tolerance_that_the_largest_number_swallows_is_caught_by_the_mean() -> None:
    wide = WIDE.copy()
    wide[0, 0, 0] = 1e4
    base = wide.astype(np.float32) + np.float32(1e-3) * (wide > 1e3)
    fused = wide.astype(np.float32) * np.float32(1 + 1e-5)
    fused[0, 0, 0] = base[0, 0, 0]
    assert not _judge(fused, base, wide).passed


def test_without_a_float64_reference_the_documented_bound_holds() -> None:
    assert _judge(BASE * np.float32(1 + 1e-6), BASE, None).passed
    assert not _judge(BASE * np.float32(1.01), BASE, None).passed


def test_the_rounding_of_all_runs_counts_together() -> None:
    exact = np.float32([[1.0]])
    runs = [
        RunOutputs("lucky", {"y": exact + np.float32(1e-5)}, {"y": exact}, {"y": exact.astype(np.float64)}),
        RunOutputs("usual", {"y": exact}, {"y": exact + np.float32(1e-5)}, {"y": exact.astype(np.float64)}),
    ]
    assert all(verdict.passed for verdict in judge_runs(runs))
    assert not judge_runs(runs[:1])[0].passed


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_fails_on_either_side_and_on_both(dtype: type) -> None:
    good = np.ones((3, 5), dtype)
    bad = good.copy()
    bad[1, 2] = np.nan
    assert _judge(bad, good, None).kind == "nan_in_fused"
    assert _judge(good, bad, None).kind == "nan_in_reference"
    both = _judge(bad, bad, None)
    assert both.kind == "nan_in_both"
    assert "nothing is compared there" in both.why


def test_an_infinity_on_one_side_fails_and_the_same_one_on_both_passes() -> None:
    wide, base = WIDE.copy(), BASE.copy()
    base[0, 0, 0] = wide[0, 0, 0] = np.inf
    assert _judge(base, base, wide).passed
    assert _judge(-base, -base, -wide).passed
    assert not _judge(BASE, base, wide).passed
    assert not _judge(np.where(np.isinf(base), -base, base), base, wide).passed


@pytest.mark.parametrize(("missing", "side"), [("fused", "FUSED"), ("base", "REFERENCE")])
def test_an_output_missing_on_a_side_fails(missing: str, side: str) -> None:
    outputs = {"fused": {"y": BASE, "z": BASE}, "base": {"y": BASE, "z": BASE}}
    del outputs[missing]["z"]
    verdicts = judge_runs([RunOutputs("run", outputs["fused"], outputs["base"], None)])
    assert [verdict.kind for verdict in verdicts] == ["passed", "missing"]
    assert side in verdicts[1].why


def test_another_shape_or_kind_of_number_fails() -> None:
    assert "shape" in _judge(BASE[:1], BASE).why
    assert "type" in _judge(BASE.astype(np.int64), BASE).why


def test_integers_must_agree() -> None:
    numbers = np.arange(60).reshape(3, 20)
    assert _judge(numbers, numbers, None).passed
    assert not _judge(numbers + (numbers == 7), numbers, None).passed


def test_an_engine_in_half_precision_may_round_as_that_type_does() -> None:
    coarse = (WIDE * (1 + 1e-3 * np.random.default_rng(4).standard_normal(WIDE.shape))).astype(np.float16)
    wrong = coarse * np.float16(1.01)
    right, scaled = (RunOutputs("run", {"y": fused}, {"y": _base()}, {"y": WIDE}) for fused in (coarse, wrong))
    assert judge_runs([right], rounding=2.0**13)[0].passed
    assert not judge_runs([right])[0].passed
    assert not judge_runs([scaled], rounding=2.0**13)[0].passed


def test_a_verdict_is_json_even_where_an_error_is_infinite() -> None:
    assert _judge(BASE[:1], BASE).as_json()["max_abs_error"] is None


@pytest.mark.parametrize(("numbers", "kind"), [(np.empty((0, 5)), "empty"), (np.full((3, 5), np.inf), "infinite")])
def test_outputs_without_a_number_to_compare_neither_pass_nor_fail(numbers: np.ndarray, kind: str) -> None:
    verdict = _judge(numbers.astype(np.float32), numbers.astype(np.float32), numbers)
    assert (verdict.kind, verdict.passed, verdict.failed, verdict.compared) == (kind, False, False, 0)


def test_infinities_of_another_sign_still_differ() -> None:
    ours, theirs = np.full(4, np.inf, np.float32), np.full(4, -np.inf, np.float32)
    assert _judge(ours, theirs, theirs.astype(np.float64)).failed


def test_a_verdict_says_how_many_numbers_it_compared() -> None:
    base, wide = _base(1), WIDE.copy()
    base[0, 0, :7] = wide[0, 0, :7] = np.inf
    assert _judge(base, base, wide).compared == WIDE.size - 7
