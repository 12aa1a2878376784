# SPDX-License-Identifier: Apache-2.0
"""Every implementation computes every row of the cache forms' table: the attention within the one tolerance rule, the
caches and the lengths bit for bit."""

from __future__ import annotations

import pytest

from contract import cache_cases
from contract.cache_cases import CACHE_CASES, CacheCase
from contract.cache_implementations import CACHE_IMPLEMENTATIONS, CacheImplementation


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("implementation", CACHE_IMPLEMENTATIONS, ids=lambda i: i.name)
def test_implementation_computes_the_cache_form(implementation: CacheImplementation, case: CacheCase) -> None:
    if reason := implementation.why_not(case):
        pytest.skip(f"{implementation.name}: {reason}")
    got = implementation.run(cache_cases.make(case))
    assert cache_cases.make(case).why_wrong(got) == []


@pytest.mark.parametrize("case", [case for case in CACHE_CASES if case.page], ids=lambda c: c.name)
@pytest.mark.parametrize("implementation", CACHE_IMPLEMENTATIONS[2:], ids=lambda i: i.name)
def test_a_paged_cache_gives_a_contiguous_ones_bits(implementation: CacheImplementation, case: CacheCase) -> None:
    if reason := implementation.why_not(case):
        pytest.skip(f"{implementation.name}: {reason}")
    in_pages = cache_cases.make(case)
    in_one_piece = cache_cases.without_pages(in_pages)
    got, wanted = (implementation.run(tensors) for tensors in (in_pages, in_one_piece))
    for name in ("output", "lse", "kv_lengths_out"):
        assert got[name].tobytes() == wanted[name].tobytes(), name


def test_the_table_has_both_forms_in_every_dtype_and_layout() -> None:
    seen = {(case.operator, case.dtype) for case in CACHE_CASES}
    assert len(seen) == 6
    assert len({(case.operator, case.layout) for case in CACHE_CASES}) == 4
