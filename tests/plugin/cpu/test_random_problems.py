# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernels on problems drawn at random: NaN and infinities stand where float64 has them and nowhere else, and
the errors of all problems together obey the tolerance rule."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from contract import cache_cases, tensors
from contract.cases import ODD_POSITION, Case
from contract.reference import attention
from contract.tolerance import DTYPES, why_lse_rejected, why_rejected

from plugin.cpu import random_problems
from plugin.cpu.cpu_library import WAYS, CpuLibrary
from plugin.cpu.random_problems import Drawn

PROBLEMS = range(400)
CACHES = range(120)


@functools.cache
def drawn() -> list[Drawn]:
    return [random_problems.draw(seed) for seed in PROBLEMS]


def test_random_problems_are_right(kernels: tuple[CpuLibrary, str]) -> None:
    library, name = kernels
    wrong: dict[int, str] = {}
    pool: dict[str, list[tuple[np.ndarray, ...]]] = {dtype: [] for dtype in DTYPES}
    for seed, problem in zip(PROBLEMS, drawn(), strict=True):
        way = list(WAYS)[seed % len(WAYS)]
        output, lse = library.run(problem.case, problem.given, name, way, threads=1 + seed % 3)
        assert lse is not None
        got, base = output.astype(np.float64), problem.base.astype(np.float64)
        if not (same_odd(got, problem.output) and same_odd(lse.astype(np.float64), problem.lse)):
            wrong[seed] = f"NaN or an infinity is in another place: {way}, {problem.case}"
        if reasons := why_lse_rejected(lse, problem.lse):
            wrong[seed] = f"{reasons}: {way}, {problem.case}"
        finite = np.isfinite(got) & np.isfinite(problem.output) & np.isfinite(base)
        if finite.any():
            size = np.abs(problem.output[finite]).max() or 1.0  # each problem counts alike
            pool[problem.case.dtype].append(tuple(x[finite] / size for x in (got, problem.output, base)))
    assert wrong == {}
    for dtype, parts in pool.items():
        got, exact, base = (np.concatenate(part) for part in zip(*parts, strict=True))
        assert len(got) > 100_000
        assert why_rejected(got.astype(DTYPES[dtype]), exact, base.astype(DTYPES[dtype])) == [], dtype


@pytest.mark.parametrize("way", WAYS)
def test_a_visible_value_shows_behind_a_score_of_minus_infinity(kernels: tuple[CpuLibrary, str], way: str) -> None:
    """A weight of 0 times an infinity is NaN; a bias that hides other keys must not take this one for hidden."""
    library, name = kernels
    case = Case(name="minus_infinity", operator="FlashAttentionEx", bias_shape=(2, 2, 37, 53), bias_kind="hidden_key")
    made = tensors.make(case)
    query, key, value = (x.copy() for x in (made.query, made.key, made.value))
    query[0, 0, :, 2] = np.abs(query[0, 0, :, 2])
    key[0, 0, 20, 2], value[0, 0, 20, 5] = -np.inf, np.inf
    key[0, 0, ODD_POSITION, 2], value[0, 0, ODD_POSITION, 6] = -np.inf, np.inf  # the bias hides this one
    given = dataclasses.replace(made, query=query, key=key, value=value)
    with np.errstate(invalid="ignore"):  # 0 times an infinity
        wanted, _ = attention(query, key, value, **tensors.formula_arguments(case, given))  # type: ignore[arg-type]
    output, _ = library.run(case, given, name, way, threads=1)
    assert np.isnan(wanted[0, 0, :, 5]).all()
    assert same_odd(output.astype(np.float64), wanted)


def same_odd(got: np.ndarray, wanted: np.ndarray) -> bool:
    """NaN is where NaN is wanted, and every infinity is the one that is."""
    odd = ~np.isfinite(wanted) | ~np.isfinite(got)
    return bool(np.array_equal(got[odd], wanted[odd], equal_nan=True))


def test_random_caches_hold_what_they_should_and_pages_change_no_bit(kernels: tuple[CpuLibrary, str]) -> None:
    library, name = kernels
    wrong = []
    for seed, cache in zip(CACHES, random_problems.caches(CACHES), strict=True):
        way, untouched = list(WAYS)[seed % len(WAYS)], cache_cases.make(cache.case)
        exact, output, _ = untouched.expected()
        in_one_piece = library.run_cache(cache_cases.without_pages(untouched), name, way, threads=1)
        got = library.run_cache(cache, name, way, threads=2)
        for output_name in ("kv_lengths_out", "key_cache_out", "value_cache_out"):
            if got[output_name].tobytes() != exact[output_name].tobytes():
                wrong.append(f"{output_name} of {cache.case}")
        for output_name in ("output", "lse"):
            if got[output_name].tobytes() != in_one_piece[output_name].tobytes():
                wrong.append(f"{output_name} differs from that of a cache in one piece: {cache.case}")
        if np.isnan(got["output"].astype(np.float64)).any() != np.isnan(output).any():
            wrong.append(f"NaN from behind the length: {cache.case}")
    assert wrong == []
