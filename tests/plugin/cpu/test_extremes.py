# SPDX-License-Identifier: Apache-2.0
"""Numbers near the ends of fp32, sinks that are none, and long sums of equal weights: each answer against float64, in
tiles and in slices alike."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from contract import reference, tensors, tolerance
from contract.cases import Case
from contract.tensors import Tensors
from contract.tolerance import why_rejected
from numpy.typing import NDArray

from plugin.cpu.cpu_library import WAYS, CpuLibrary

LARGEST = float(np.finfo(np.float32).max)
BOTH = ("tiles", "slices")


def exact(case: Case, given: Tensors) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    with np.errstate(all="ignore"):
        return reference.attention(given.query, given.key, given.value, **tensors.formula_arguments(case, given))  # type: ignore[arg-type]


def scaled(given: Tensors, query: float = 1.0, key: float = 1.0, value: float = 1.0) -> Tensors:
    """The same numbers times these, in their dtype."""

    def times(x: NDArray, factor: float) -> NDArray:
        return (x.astype(np.float64) * factor).astype(x.dtype)

    return dataclasses.replace(
        given, query=times(given.query, query), key=times(given.key, key), value=times(given.value, value)
    )


# Products of a modest size, by factors that have no room beside one another in fp32.
FAR = {
    "large_scale_of_small_queries": (1e30, 1e-30, 1.0),
    "small_scale_of_large_queries": (1e-30, 1e30, 1.0),
    "scaled_queries_overflow": (1e30, 1e9, 1e-39),
    "scaled_queries_underflow": (1e-30, 1e-7, 1e37),
    "scaled_queries_are_0": (1e-30, 1e-20, 1e37),
    "negative": (-1e30, 1e9, 1e-39),
    "both_small": (1e30, 1e-15, 1e-15),
    "both_large": (1e-30, 1e15, 1e15),
    "smallest_queries": (1.0, 1e-38, 1e37),
    "largest_queries": (1.0, 1e37, 1e-37),
    "smallest_scale": (1e-44, 1e30, 1e14),
}


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("name", FAR)
def test_a_scale_far_from_1_costs_no_digits(kernels: tuple[CpuLibrary, str], name: str, way: str) -> None:
    library, target = kernels
    scale, query, key = FAR[name]
    plain = Case(name="far_scales", head_dim=19, layout=1, scale=1.0)
    case = dataclasses.replace(plain, scale=scale)
    given = scaled(tensors.make(plain), query=query, key=key)
    wanted, _ = exact(case, given)
    got, _ = library.run(case, given, target, way, threads=1)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(got, wanted, atol=4e-6)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", [{}, {"causal": 1}, {"kv_lengths": (0, 31)}, {"softcap": 2.0}], ids=str)
def test_values_near_the_largest_have_a_finite_mean(
    kernels: tuple[CpuLibrary, str], dtype: str, mask: dict[str, int], way: str
) -> None:
    """Their sum has not: 53 of them, before it is divided by the weights' sum."""
    library, target = kernels
    operator = "FlashAttentionEx" if "kv_lengths" in mask else "FlashAttention"
    case = Case(name="large_values", operator=operator, dtype=dtype, head_dim=19, layout=1, score_std=0.5, **mask)  # type: ignore[arg-type]
    made = tensors.make(case)
    largest = float(np.abs(made.value.astype(np.float64)).max())
    given = scaled(made, value=0.999 * LARGEST / largest)
    given = dataclasses.replace(given, value=np.abs(given.value))
    wanted, _ = exact(case, given)
    got, _ = library.run(case, given, target, way, threads=1)
    step = {"fp32": 3e-6, "bf16": 2.0**-8}[dtype]
    np.testing.assert_allclose(got.astype(np.float64) / LARGEST, wanted / LARGEST, atol=step)


@pytest.mark.parametrize("way", BOTH)
def test_a_mean_of_the_largest_number_is_that_number(kernels: tuple[CpuLibrary, str], way: str) -> None:
    library, target = kernels
    case = Case(name="largest_values", head_dim=19, layout=1)
    made = tensors.make(case)
    given = dataclasses.replace(made, value=np.full_like(made.value, -LARGEST))
    got, _ = library.run(case, given, target, way, threads=1)
    np.testing.assert_allclose(got.astype(np.float64) / LARGEST, -1, rtol=1e-5)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("sink", [np.inf, np.nan])
def test_a_sink_of_infinity_has_all_the_weight_and_one_of_nan_shows_but_not_in_rows_without_a_key(
    kernels: tuple[CpuLibrary, str], sink: float, way: str
) -> None:
    library, target = kernels
    case = Case(
        name="odd_sinks", operator="FlashAttentionEx", bias_shape=(2, 2, 37, 53), bias_kind="hidden_rows",
        kv_lengths=(0, 40), sinks=2, layout=1, causal=1, diagonal=1,
    )  # fmt: skip
    made = tensors.make(case)
    assert made.sinks is not None
    given = dataclasses.replace(made, sinks=np.array([sink, made.sinks[1]], np.float32))
    output, lse = library.run(case, given, target, way, threads=1)
    plain, plain_lse = library.run(case, made, target, way, threads=1)
    assert lse is not None
    assert plain_lse is not None
    keyless = np.isclose(plain_lse[:, 0], made.sinks[0]) & (plain[:, 0] == 0).all(-1)
    assert keyless[0].all()
    assert 0 < keyless[1].sum() < keyless[1].size
    np.testing.assert_array_equal(output[:, 0][keyless], 0)
    np.testing.assert_array_equal(lse[:, 0][keyless], np.float32(sink))
    np.testing.assert_array_equal(output[:, 0][~keyless], 0 if sink == np.inf else np.nan)
    np.testing.assert_array_equal(lse[:, 0][~keyless], np.float32(sink))
    assert output[:, 1].tobytes() == plain[:, 1].tobytes()


@pytest.mark.parametrize("way", BOTH)
def test_a_million_equal_weights_keep_their_digits(kernels: tuple[CpuLibrary, str], way: str) -> None:
    """Sums of blocks are rounded alike too: one addition a tile erred by 1.4e-4, one a run of 512 keys by 1e-5."""
    library, target = kernels
    heads, queries, keys = (1, 12, 2**20) if way == "tiles" else (8, 1, 2**20)
    case = Case(
        name="flat_scores", operator="FlashAttentionEx", batch=1, heads_q=heads, heads_kv=heads, seqlen_q=queries,
        seqlen_kv=keys, head_dim=1, layout=1, sinks=1,
    )  # fmt: skip
    nothing = np.zeros((1, heads, keys, 1), np.float32)
    for sink, value in ((0.37, 1 / 3), (2.9, 1.1), (7.3, 0.7)):
        given = Tensors(
            nothing[:, :, :queries], nothing, np.full_like(nothing, value), None, None, np.array([sink], np.float32)
        )
        output, lse = library.run(case, given, target, way, threads=2)
        weights = keys + np.exp(np.float64(np.float32(sink)))
        np.testing.assert_allclose(output, np.float32(value) * keys / weights, rtol=3e-6)
        assert lse is not None
        np.testing.assert_allclose(lse, np.log(weights), atol=3e-6)


@pytest.mark.parametrize("way", BOTH)
def test_runs_by_the_thousand_cost_no_digits(kernels: tuple[CpuLibrary, str], way: str) -> None:
    """With sums of one part the means of this many equal values erred by 1e-5 in tiles, by 6e-6 in slices."""
    library, target = kernels
    keys = 2**23
    case = Case(
        name="many_runs", batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=keys, head_dim=1, layout=1,
    )  # fmt: skip
    nothing = np.zeros((1, 1, keys, 1), np.float32)
    given = Tensors(nothing[:, :, :1], nothing, np.full_like(nothing, 1.1), None, None, None)
    output, _ = library.run(case, given, target, way, threads=1)
    np.testing.assert_allclose(output, np.float32(1.1), rtol=3e-6)


@pytest.mark.parametrize("way", BOTH)
def test_a_maximum_that_rises_a_little_with_every_run_costs_no_digits(
    kernels: tuple[CpuLibrary, str], way: str
) -> None:
    """Shrinking the sums by nearly 1 with every run erred by 2e-5 in slices, by 6e-6 in tiles."""
    library, target = kernels
    heads, queries, keys, run = (1, 12, 2**22, 8192) if way == "tiles" else (8, 1, 2**20, 512)
    case = Case(
        name="rising", batch=1, heads_q=heads, heads_kv=heads, seqlen_q=queries, seqlen_kv=keys, head_dim=1, layout=1,
        scale=1.0,
    )  # fmt: skip
    scores = (np.arange(keys) // run * 8.9e-8).astype(np.float32)
    values = np.where(np.arange(keys) < keys // 2, -1, 1).astype(np.float32)
    key, value = (np.tile(x[:, None], (1, heads, 1, 1)) for x in (scores, values))
    output, _ = library.run(
        case, Tensors(np.ones((1, heads, queries, 1), np.float32), key, value, None, None, None), target, way, 1
    )
    weights = np.exp(scores.astype(np.float64))
    np.testing.assert_allclose(output, weights @ values / weights.sum(), rtol=0, atol=5e-7)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize(("first", "keys"), [(0.0, 2**23), (2.0**24 + 2, 10_000_000)])
def test_a_mean_of_the_largest_is_finite_however_many_weigh_more_than_the_first(
    kernels: tuple[CpuLibrary, str], way: str, first: float, keys: int
) -> None:
    """Their weights beside the first key's are e, the most that there is; the next number above 2^24 + 2 is 2 more."""
    library, target = kernels
    case = Case(
        name="heavy", batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=keys, head_dim=1, layout=1, scale=1.0,
    )  # fmt: skip
    ones = np.ones((1, 1, keys, 1), np.float32)
    key = np.full_like(ones, first + (2 if first else 1))
    key[0, 0, :8192] = first
    given = Tensors(ones[:, :, :1], key, ones * np.float32(0.999 * LARGEST), None, None, None)
    output, _ = library.run(case, given, target, way, threads=1)
    np.testing.assert_allclose(output.astype(np.float64) / LARGEST, 0.999, rtol=3e-6)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_runs_of_tiles_join_whatever_their_largest_scores_are(
    kernels: tuple[CpuLibrary, str], order: int, way: str
) -> None:
    """Over 3 runs of 8,192 keys and some; one batch entry ends within the second, and begins within the first."""
    library, target = kernels
    case = Case(
        name="runs", operator="FlashAttentionEx", heads_q=1, heads_kv=1, seqlen_q=77, seqlen_kv=25_001, head_dim=3,
        layout=1, causal=1, diagonal=1, window_left=12_000, kv_lengths=(25_001, 12_500), score_std=9.0,
    )  # fmt: skip
    made = tensors.make(case)
    size = np.linspace(0, 1, case.seqlen_kv)[::order, None]
    value = made.value.copy()
    value[0, 0, 24_990, 1], value[1, 0, 450, 2] = np.inf, np.nan
    given = dataclasses.replace(made, key=(made.key * size).astype(np.float32), value=value)
    wanted, wanted_lse = exact(case, given)
    base = tolerance.unfused(given.query, given.key, given.value, **tensors.formula_arguments(case, given))  # type: ignore[arg-type]
    output, lse = library.run(case, given, target, way, threads=1)
    assert np.isposinf(wanted).any()
    assert 0 < np.isnan(wanted[1, 0, :, 2]).sum() < case.seqlen_q
    assert why_rejected(output, wanted, base) == []
    assert lse is not None
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("sink", [5.0, 40.0, 80.0])
def test_a_sink_far_above_the_scores_costs_no_digits(kernels: tuple[CpuLibrary, str], sink: float, way: str) -> None:
    """The outputs are tiny then, and each is judged against itself: weights of e^-80 erred by 1e-6 on average."""
    library, target = kernels
    case = Case(
        name="high_sinks", operator="FlashAttentionEx", heads_q=4, heads_kv=4, seqlen_q=5, head_dim=64, layout=1,
        sinks=1, scale=0.125, value_mean=3.0,
    )  # fmt: skip
    made, random = tensors.make(case), np.random.default_rng(5)
    query, key = (random.integers(-1, 2, x.shape).astype(np.float32) for x in (made.query, made.key))
    given = dataclasses.replace(made, query=query, key=key, sinks=np.array([sink], np.float32))
    wanted, wanted_lse = exact(case, given)
    output, lse = library.run(case, given, target, way, threads=1)
    error = np.abs(output / wanted - 1)
    assert error.mean() < 2e-7
    assert error.max() < 2e-6
    assert lse is not None
    np.testing.assert_allclose(lse, wanted_lse, rtol=3e-7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keys", [96, 512, 2048])
def test_the_sum_of_equal_weights_keeps_its_digits(kernels: tuple[CpuLibrary, str], keys: int, way: str) -> None:
    """Beside a sink the weights of equal scores are no powers of two: added one by one, all are rounded alike."""
    library, target = kernels
    case = Case(
        name="flat_scores", operator="FlashAttentionEx", batch=1, heads_q=1, heads_kv=1, seqlen_q=24, seqlen_kv=keys,
        head_dim=64, layout=1, sinks=1,
    )  # fmt: skip
    made = tensors.make(case)
    for sink in np.arange(0.1, 8, 0.8):
        given = dataclasses.replace(made, query=np.zeros_like(made.query), sinks=np.array([sink], np.float32))
        wanted, _ = exact(case, given)
        base = tolerance.unfused(given.query, given.key, given.value, **tensors.formula_arguments(case, given))  # type: ignore[arg-type]
        output, _ = library.run(case, given, target, way, threads=1)
        assert why_rejected(output, wanted, base) == [], f"sink {sink}"


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize(("keys", "dims"), [(2**18, 3), (2**16, 61)])
def test_keys_by_the_hundred_thousand_cost_no_digits(
    kernels: tuple[CpuLibrary, str], keys: int, dims: int, way: str
) -> None:
    """One sum over all of them is off by 1e-5. So many heads are no more than one slice each on few processors."""
    library, target = kernels
    case = Case(
        name="long_sums", batch=1, heads_q=8, heads_kv=8, seqlen_q=1, seqlen_kv=keys, head_dim=1, v_head_dim=dims,
        layout=1, score_std=0.5,
    )  # fmt: skip
    made = tensors.make(case)
    given = dataclasses.replace(made, value=(1.1 + 0.1 * made.value).astype(np.float32))
    wanted, _ = exact(case, given)
    output, _ = library.run(case, given, target, way, threads=1)
    np.testing.assert_allclose(output, wanted, rtol=4e-6)
