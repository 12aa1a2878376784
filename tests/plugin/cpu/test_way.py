# SPDX-License-Identifier: Apache-2.0
"""Which rows the kernels attend in slices. A session may have one thread on a machine with many processors, so no
number of processors may send it more rows than slices serve at about twice a tile's time."""

from __future__ import annotations

import pytest
from contract import tensors
from contract.cases import Case
from contract.emulated_library import Problem

from plugin.cpu.cpu_library import CpuLibrary

ALONE = {("fp32", 400): 4, ("fp32", 15): 2, ("fp16", 400): 2, ("bf16", 400): 2, ("fp16", 15): 2}
"""dtype and keys -> rows that are as fast in slices as in a tile, on one thread."""


def problem(dtype: str, keys: int, rows: int = 1, group: int = 1) -> Problem:
    case = Case(
        name="way", operator="FlashAttentionEx", dtype=dtype, batch=2, heads_q=4 * group, heads_kv=4,
        seqlen_q=rows // group, seqlen_kv=keys, head_dim=24, layout=1,
    )  # fmt: skip
    return Problem(case, tensors.make(case))


@pytest.mark.parametrize(("dtype", "keys"), ALONE)
def test_processors_past_twice_the_heads_send_no_more_rows_to_slices(
    kernels: tuple[CpuLibrary, str], dtype: str, keys: int
) -> None:
    library, target = kernels
    alone, given = ALONE[dtype, keys], problem(dtype, keys)
    for processors, most in {1: alone, 2: alone, 15: alone, 16: 2 * alone, 17: 2 * alone, 1024: 2 * alone}.items():
        assert library.most_slice_rows(given, target, processors) == most, f"{processors} processors, 8 heads"


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_rows_go_the_way_that_their_number_says(kernels: tuple[CpuLibrary, str], dtype: str, group: int) -> None:
    """Both ways give other bits. Here the number of rows decides alone, whatever this machine has of processors."""
    library, target = kernels
    alone = ALONE[dtype, 400]
    for rows, way, other in ((alone, "slices", "tiles"), (2 * alone + group, "tiles", "slices")):
        lse = {}
        for name in ("chosen", way, other):
            given = problem(dtype, 400, rows, group)
            library.attend(given, target, name, threads=1)
            assert given.lse is not None
            lse[name] = given.lse.tolist()
        assert lse["chosen"] == lse[way], f"{rows} rows"
        assert lse["chosen"] != lse[other], f"{rows} rows"
