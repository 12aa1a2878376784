# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from flash_export.accept import FACTOR_WITH_SOFTCAP, Noise, judge, overflows, roundings, unit_in_last_place

RNG = np.random.default_rng(0)
REFERENCE = RNG.standard_normal((7, 301))
NOISE = Noise(1e-6, 1e-7)
LARGEST = float(np.abs(REFERENCE).max())


def test_twice_the_noise_passes_and_more_fails_with_the_place_and_both_numbers() -> None:
    ulp = unit_in_last_place(REFERENCE, np.dtype(np.float32))
    allowed = 2e-6 * LARGEST + 2 * ulp
    near, far = REFERENCE.copy(), REFERENCE.copy()
    near[3, 5] += 0.99 * allowed
    far[3, 5] += 1.01 * allowed
    assert judge(near, REFERENCE, NOISE).passed
    verdict = judge(far, REFERENCE, NOISE)
    assert not verdict.passed
    assert "[3, 5]" in verdict.why
    assert verdict.tolerance == pytest.approx(allowed)
    assert judge(far, REFERENCE, NOISE, factor=FACTOR_WITH_SOFTCAP).passed


@pytest.mark.parametrize(("other", "both"), [(0.0, 1.0), (1.0, 1.0), (3.0, 2.0), (8.0, 4.5), (8.1, 1.0), (1e9, 1.0)])
def test_a_second_rounding_counts_where_it_is_of_the_same_order(other: float, both: float) -> None:
    assert Noise(1.0, 1.0).beside(Noise(other, 0.0)) == Noise(both, 1.0)
    assert Noise(1.0, 1.0).beside(Noise(0.0, other)) == Noise(1.0, both)


def test_a_small_error_everywhere_fails_by_its_mean_where_there_are_enough_numbers() -> None:
    shifted = REFERENCE + 1e-6
    assert "mean" in judge(shifted, REFERENCE, NOISE).why
    assert judge(shifted[:, :100], REFERENCE[:, :100], NOISE).passed, "700 numbers are too few for the mean rule"


def test_the_ulp_is_the_step_of_the_type_around_the_numbers() -> None:
    ones = np.ones(5)
    assert 0 <= unit_in_last_place(ones, np.dtype(np.float32)) <= 2**-23
    assert unit_in_last_place(ones * 0.7, np.dtype(np.float16)) <= 2**-10
    assert unit_in_last_place(np.zeros(0), np.dtype(np.float32)) == 0.0


def test_nan_of_the_reference_is_a_class_of_its_own_and_the_output_must_be_finite_there() -> None:
    holed = REFERENCE.copy()
    holed[2] = np.nan
    filled, infinite = holed.copy(), holed.copy()
    filled[2], infinite[2] = 0.0, np.inf
    verdict = judge(filled, holed, NOISE)
    assert verdict.passed
    assert verdict.reference_is_nan == 301
    assert not judge(holed, holed, NOISE).passed
    assert judge(holed, holed, NOISE, nan_may_stay=True).passed
    assert not judge(holed, REFERENCE, NOISE, nan_may_stay=True).passed
    assert not judge(infinite, holed, NOISE).passed


def test_nan_or_infinity_of_the_output_alone_fails() -> None:
    for wrong in (np.nan, np.inf):
        output = REFERENCE.copy()
        output[0, 0] = wrong
        assert not judge(output, REFERENCE, NOISE).passed


def test_the_same_infinity_on_both_sides_passes_and_the_opposite_one_fails() -> None:
    reference = REFERENCE.copy()
    reference[1, 1] = np.inf
    opposite = reference.copy()
    opposite[1, 1] = -np.inf
    assert judge(reference, reference, NOISE).passed
    assert not judge(opposite, reference, NOISE).passed


def test_another_shape_fails_even_where_it_would_broadcast() -> None:
    assert "shape" in judge(REFERENCE[:1], REFERENCE, NOISE).why


def test_integers_must_be_equal_but_for_what_rounding_turns_over_in_the_unfused_model() -> None:
    reference = np.arange(1000)
    base = reference.copy()
    base[:3] += 1
    noise = Noise.between(base, reference)
    output = reference.copy()
    output[:6] += 1
    assert judge(output, reference, noise).passed
    output[6] += 1
    assert "7 of 1000" in judge(output, reference, noise).why
    assert not judge(output, reference, NOISE).passed


def test_noise_is_relative_pooled_by_its_largest_and_blind_to_nan() -> None:
    reference = np.array([4.0, 2.0, np.nan])
    noise = Noise.between(np.array([4.0, 2.004, 1.0]), reference)
    assert noise.maximum == pytest.approx(0.001)
    assert noise.mean == pytest.approx(0.002 / 3)
    assert Noise.pooled([noise, Noise(0.0, 1.0)]) == Noise(noise.maximum, 1.0)
    assert Noise.pooled([]) == Noise(0.0, 0.0)


def test_empty_outputs_pass() -> None:
    empty = np.zeros((0, 3))
    assert judge(empty, empty, Noise.between(empty, empty)).passed


def test_small_outputs_are_measured_more_often_and_large_ones_once() -> None:
    assert (roundings(0), roundings(100), roundings(2**15), roundings(2**20)) == (8, 8, 2, 1)


def test_nothing_is_asked_where_the_unfused_graph_itself_leaves_float32() -> None:
    base, wrong = REFERENCE.astype(np.float32), REFERENCE.copy()
    base[2], base[3, 0], wrong[2] = np.nan, np.inf, np.nan
    overflow = overflows(base, REFERENCE)
    assert overflow is not None
    assert overflow.sum() == 302
    assert not judge(wrong, REFERENCE, NOISE).passed
    verdict = judge(wrong, REFERENCE, NOISE, overflow=overflow)
    assert verdict.passed
    assert verdict.compared == REFERENCE.size - 302
    wrong[4, 4] += 1e-3
    assert not judge(wrong, REFERENCE, NOISE, overflow=overflow).passed
    assert overflows(REFERENCE, REFERENCE) is None
    assert overflows(np.array([1]), np.array([2])) is None
