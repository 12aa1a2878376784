# SPDX-License-Identifier: Apache-2.0
"""Problems drawn at random, the odd ones among them: what a table written by hand does not think of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from contract import cache_cases, reference, tensors, tolerance
from contract.cache_cases import CacheCase, CacheTensors
from contract.cases import Case
from contract.tensors import Tensors
from contract.tolerance import DTYPES
from numpy.typing import NDArray

QUERIES = (0, 1, 1, 2, 3, 4, 5, 16, 17, 33, 48, 49, 65, 97)
KEYS = (0, 1, 2, 3, 15, 16, 17, 33, 64, 65, 100, 127, 128, 129, 257, 511, 513, 530)
HEAD_DIMS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 80, 128, 130)
ODD_NUMBERS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40)
LIMIT = 2**31
PAIRS = 40_000  # of a query and a key, all heads; a problem of more takes seconds in NumPy


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """A problem with what must come out."""

    case: Case
    given: Tensors
    output: NDArray[np.float64]
    lse: NDArray[np.float64]
    base: NDArray


def draw(seed: int) -> Drawn:
    """The problem of a seed."""
    random = np.random.default_rng(seed)
    case = _case(f"random_{seed}", random)
    given = _tensors(case, random)
    arguments = tensors.formula_arguments(case, given)
    with np.errstate(all="ignore"):
        output, lse = reference.attention(given.query, given.key, given.value, **arguments)  # type: ignore[arg-type]
        base = tolerance.unfused(given.query, given.key, given.value, **arguments)  # type: ignore[arg-type]
    return Drawn(case, given, output, lse, base)


def _case(name: str, random: np.random.Generator) -> Case:
    heads_kv, group = (int(random.choice((1, 1, 2, 3, 5))) for _ in range(2))
    batch, seqlen_q, seqlen_kv = (int(random.choice(x)) for x in ((0, 1, 1, 2, 3), QUERIES, KEYS))
    if heads_kv * group * seqlen_q * seqlen_kv > PAIRS:
        seqlen_q = int(random.choice(QUERIES[:8]))
    head_dim, v_head_dim = (int(random.choice(HEAD_DIMS)) for _ in range(2))
    full = (batch, heads_kv * group, seqlen_q, seqlen_kv)
    windows = (-1, -1, -1, 0, 1, 5, 40, LIMIT - 1)
    lengths = (0, 1, seqlen_kv // 2, seqlen_kv, seqlen_kv - 1, seqlen_kv + 5, -3, LIMIT - 1, -LIMIT)
    return Case(
        name=name,
        operator="FlashAttentionEx",
        dtype=str(random.choice(("fp32", "fp32", "fp16", "bf16"))),
        batch=batch,
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=head_dim,
        v_head_dim=head_dim if random.random() < 0.4 else v_head_dim,
        layout=int(random.integers(2)),
        scale=(None, None, 0.3, -0.2, 1.0)[random.integers(5)],
        softcap=float(random.choice((0, 0, 0, 2.5, 30))),
        causal=int(random.integers(2)),
        diagonal=int(random.integers(2)),
        window_left=int(random.choice(windows)),
        window_right=int(random.choice(windows)),
        bias_shape=tuple(n if random.random() < 0.5 else 1 for n in full) if random.random() < 0.45 else None,  # type: ignore[arg-type]
        bias_fp32=bool(random.integers(2)),
        kv_lengths=tuple(int(random.choice(lengths)) for _ in range(random.choice((1, batch))))
        if random.random() < 0.4
        else None,
        sinks=int(random.choice((0, 0, 1, 2))),
    )


def _tensors(case: Case, random: np.random.Generator) -> Tensors:
    dtype = DTYPES[case.dtype]
    strength = 2.5 / (abs(case.softmax_scale) * case.head_dim**0.5)
    query = random.standard_normal((case.batch, case.heads_q, case.seqlen_q, case.head_dim)) * strength
    key = random.standard_normal((case.batch, case.heads_kv, case.seqlen_kv, case.head_dim))
    value = random.standard_normal((case.batch, case.heads_kv, case.seqlen_kv, case.dv))
    bias = None
    if case.bias_shape is not None:
        bias = random.standard_normal(case.bias_shape) * 2
        bias[random.random(case.bias_shape) < random.choice((0, 0, 0.2, 0.5, 1))] = -np.inf
        if random.random() < 0.15:
            _sow(bias, (np.nan, np.inf, -3e4), random)
        bias = bias.astype(DTYPES["fp32" if case.bias_fp32 else case.dtype])
    for array in (query, key, value):
        if random.random() < 0.3:
            _sow(array, ODD_NUMBERS, random)
    sinks = None
    if case.sinks:
        sinks = (random.standard_normal(case.heads_q if case.sinks == 2 else 1) * 3).astype(np.float32)
    lengths = None if case.kv_lengths is None else np.array(case.kv_lengths, np.int32)
    return Tensors(query.astype(dtype), key.astype(dtype), value.astype(dtype), bias, lengths, sinks)


def _sow(array: NDArray, numbers: tuple[float, ...], random: np.random.Generator) -> None:
    for _ in range(random.choice((1, 1, 2, 5)) if array.size else 0):
        array.flat[random.integers(array.size)] = random.choice(numbers)


def caches(seeds: range) -> Iterator[CacheTensors]:
    """Paged caches, NaN behind their lengths."""
    for seed in seeds:
        random = np.random.default_rng(seed)
        page, width, batch = int(random.choice((16, 32, 64, 256))), int(random.integers(0, 5)), int(random.integers(4))
        capacity, heads_kv = page * width, int(random.choice((1, 2, 3)))
        case = CacheCase(
            f"random_cache_{seed}",
            tuple(int(n) for n in random.choice((0, 1, capacity // 2, capacity, capacity - 1, -4, 10**9), batch)),
            seqlen_q=int(random.choice(QUERIES[:10])),
            new=int(random.choice((0, 1, 1, 2, 16, 33, 300))),
            capacity=capacity,
            page=page,
            dtype=str(random.choice(("fp32", "fp16", "bf16"))),
            layout=int(random.integers(2)),
            heads_q=heads_kv * int(random.choice((1, 2, 3))),
            heads_kv=heads_kv,
            head_dim=int(random.choice(HEAD_DIMS)),
            v_head_dim=int(random.choice(HEAD_DIMS)),
            causal=int(random.integers(2)),
            diagonal=int(random.integers(2)),
            window_left=int(random.choice((-1, -1, 0, 7, 100))),
            bias=bool(random.integers(2)),
            sinks=bool(random.integers(2)),
            nan_behind=bool(random.integers(2)),
        )
        yield cache_cases.make(case)
