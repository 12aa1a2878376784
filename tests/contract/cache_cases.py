# SPDX-License-Identifier: Apache-2.0
"""The cache forms' table of cases, their numbers, and what docs/op.md says must come out, in float64.

The append is written here row by row, the attention is ``reference.attention`` on the rows that it leaves.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract import reference, tolerance
from contract.tensors import heads_first, in_layout
from contract.tolerance import DTYPES, why_lse_rejected, why_rejected


@dataclasses.dataclass(frozen=True, slots=True)
class CacheCase:
    """One node: B is the number of ``lengths``; with a ``page`` the cache is paged, ``width`` entries a batch."""

    name: str
    lengths: tuple[int, ...]
    seqlen_q: int = 5
    new: int = 5
    capacity: int = 48
    page: int = 0
    dtype: str = "fp32"
    layout: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    v_head_dim: int = 24
    causal: int = 1
    diagonal: int = 1
    window_left: int = -1
    softcap: float = 0.0
    bias: bool = False
    sinks: bool = False
    one_length: bool = False
    nan_behind: bool = False
    wild_entries: bool = False

    @property
    def operator(self) -> str:
        """The name of the node."""
        return "FlashAttentionPagedCache" if self.page else "FlashAttentionCache"

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths)

    def attributes(self) -> dict[str, int | float]:
        """Every numeric attribute of the node."""
        return {
            "layout": self.layout, "q_num_heads": self.heads_q, "kv_num_heads": self.heads_kv, "causal": self.causal,
            "diagonal": self.diagonal, "window_left": self.window_left, "window_right": -1,
            "has_bias": int(self.bias), "has_kv_lengths": 1, "has_sinks": int(self.sinks), "scale": 0.3,
            "softcap": self.softcap,
        }  # fmt: skip


def both(name: str, lengths: tuple[int, ...], **settings: Any) -> list[CacheCase]:
    """The case with a contiguous cache and with one in pages of 16."""
    paged = CacheCase(f"{name}_paged", lengths, page=16, **settings)
    return [CacheCase(name, lengths, **settings), paged]


CACHE_CASES = [
    *both("prompt_into_an_empty_cache", (0, 0)),
    *both("decode", (0, 13, 47, 30), seqlen_q=1, new=1),
    *both("no_room_for_all", (0, 14, 45, 48, 99), causal=1),
    *both("negative_length", (-3, 7)),
    *both("one_length_for_all", (17,) * 3, one_length=True),
    *both("heads_last", (0, 14, 45), layout=0),
    *both("fp16", (0, 14, 45), dtype="fp16"),
    *both("bf16_heads_last", (0, 14, 45), dtype="bf16", layout=0),
    *both("queries_alone", (0, 14, 45), new=0),
    *both("keys_alone", (0, 14, 45), seqlen_q=0),
    *both("fewer_queries_than_new_keys", (0, 14, 33), seqlen_q=3, new=9),
    *both("more_queries_than_new_keys", (0, 14, 33), seqlen_q=9, new=2),
    *both("top_left", (0, 14, 33), diagonal=0),
    *both("everything", (0, 14, 45, 21), window_left=7, softcap=5.0, bias=True, sinks=True),
    *both("nan_behind_the_length", (0, 14, 20), nan_behind=True),
    *both("more_new_than_capacity", (0, 5), new=60, seqlen_q=60, dtype="fp16"),
    *both("batch_zero", ()),
    *both("long_decode", (700, 1, 523), seqlen_q=1, new=1, capacity=720, window_left=600, head_dim=33, v_head_dim=40),
    *both("odd_group", (0, 29, 44), heads_q=5, heads_kv=1, seqlen_q=2, new=2, dtype="bf16"),
    *both("one_query_head_a_key_head", (0, 9), heads_q=3, heads_kv=3, layout=0, v_head_dim=16),
    *both("many_queries", (0, 70, 190), seqlen_q=61, new=61, capacity=240, causal=0, window_left=77),
    CacheCase("pages_of_256_paged", (200, 0, 480), page=256, capacity=768, seqlen_q=40, new=40, bias=True),
    CacheCase("pages_of_64_decode_paged", (63, 64, 127), page=64, capacity=128, seqlen_q=1, new=1, dtype="fp16"),
    CacheCase("no_capacity", (0, 3), capacity=0),
    CacheCase("odd_capacity", (0, 3, 30), capacity=37, head_dim=7, v_head_dim=5),
    CacheCase("wild_entries_behind_the_last_key_paged", (0, 14, 10), page=16, wild_entries=True),
]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheTensors:
    """A node's inputs in its layout, by name; ``page_table`` only where the cache is paged."""

    case: CacheCase
    given: dict[str, NDArray]

    def expected(self) -> tuple[dict[str, NDArray], NDArray, NDArray]:
        """The exact outputs; the float64 reference of ``output``; the base of the tolerance rule."""
        case, given = self.case, self.given
        before = np.clip(given["kv_lengths"].astype(np.int64), 0, case.capacity)
        before = np.broadcast_to(before, (case.batch,))
        caches, rows = {}, {}
        for name in ("key", "value"):
            cache = heads_first(given[f"{name}_cache"], case.layout, case.heads_kv).copy()
            new = heads_first(given[name], case.layout, case.heads_kv)
            for b in range(case.batch):
                for i in range(min(case.new, case.capacity - int(before[b]))):
                    outer, row = self._place(b, int(before[b]) + i)
                    cache[outer, :, row] = new[b, :, i]
            rows[name] = np.zeros((case.batch, case.heads_kv, case.capacity, cache.shape[-1]), cache.dtype)
            after = np.minimum(before + case.new, case.capacity).astype(np.int32)
            for b in range(case.batch):
                for j in range(int(after[b])):
                    outer, row = self._place(b, j)
                    rows[name][b, :, j] = cache[outer, :, row]
            caches[f"{name}_cache_out"] = in_layout(cache, case.layout)
        settings = {name: case.attributes()[name] for name in ("scale", "softcap", "causal", "diagonal", "window_left")}
        sides = {
            "bias": given["bias"] if case.bias else None,
            "kv_lengths": after,
            "sinks": given["sinks"] if case.sinks else None,
        }
        query = heads_first(given["query"], case.layout, case.heads_q)
        operands = (query, rows["key"], rows["value"])
        output, lse = reference.attention(*operands, **settings, **sides)
        base = tolerance.unfused(*operands, **settings, **sides)
        return {"lse": lse, "kv_lengths_out": after, **caches}, output, base

    def _place(self, batch: int, key: int) -> tuple[int, int]:
        """Batch or page, and row, of a key in the cache."""
        if not self.case.page:
            return batch, key
        return int(self.given["page_table"][batch, key // self.case.page]), key % self.case.page

    def why_wrong(self, got: dict[str, NDArray]) -> list[str]:
        """Why these outputs, by name in the node's layout, are not accepted."""
        exact, output, base = self.expected()
        reasons = why_rejected(
            heads_first(got["output"], self.case.layout, self.case.heads_q), output, base, softcap=self.case.softcap
        )
        reasons += why_lse_rejected(got["lse"], exact["lse"])
        for name in ("kv_lengths_out", "key_cache_out", "value_cache_out"):
            if not np.array_equal(_bits(got[name]), _bits(exact[name])):
                reasons.append(f"{name} differs: {got[name].shape} {got[name].dtype}")
        return reasons


def _bits(x: NDArray) -> NDArray:
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def make(case: CacheCase) -> CacheTensors:
    """The case's numbers, from its name."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    dtype, batch = DTYPES[case.dtype], case.batch

    def random(outer: int, heads: int, rows: int, dim: int) -> NDArray:
        return rng.standard_normal((outer, heads, rows, dim)).astype(dtype)

    width = case.capacity // case.page if case.page else 0
    outer, rows = (batch * width + 2, case.page) if case.page else (batch, case.capacity)
    table = rng.permutation(outer)[: batch * width].reshape(batch, width).astype(np.int32)
    caches = [random(outer, case.heads_kv, rows, dim) for dim in (case.head_dim, case.v_head_dim)]
    before = np.clip(np.array(case.lengths, np.int64), 0, case.capacity)
    if case.nan_behind:
        for b in range(batch):
            for j in range(int(before[b]), case.capacity):
                where = (table[b, j // case.page], j % case.page) if case.page else (b, j)
                for cache in caches:
                    cache[where[0], :, where[1]] = np.nan
    if case.wild_entries:
        for b in range(batch):
            last = -(-min(int(before[b]) + case.new, case.capacity) // case.page)
            table[b, last:] = [10**6, -5, 2**31 - 1][: width - last]
    given = {
        "query": random(batch, case.heads_q, case.seqlen_q, case.head_dim),
        "key": random(batch, case.heads_kv, case.new, case.head_dim),
        "value": random(batch, case.heads_kv, case.new, case.v_head_dim),
        "bias": rng.standard_normal((1, case.heads_q, 1, case.capacity) if case.bias else (1, 1, 1, 1)).astype(dtype),
        "kv_lengths": np.array(case.lengths[:1] if case.one_length else case.lengths, np.int32),
        "sinks": rng.standard_normal(case.heads_q if case.sinks else 1).astype(np.float32),
        "key_cache": caches[0],
        "value_cache": caches[1],
    }
    for name in ("query", "key", "value", "key_cache", "value_cache"):
        given[name] = in_layout(given[name], case.layout)
    if case.page:
        given["page_table"] = table
    return CacheTensors(case, given)


def without_pages(tensors: CacheTensors) -> CacheTensors:
    """The same numbers with each batch's pages one behind the other; an entry that is no page gives zeros."""
    case, table = tensors.case, tensors.given["page_table"]
    given = {name: array for name, array in tensors.given.items() if name != "page_table"}
    for name in ("key_cache", "value_cache"):
        pool = heads_first(tensors.given[name], case.layout, case.heads_kv)
        rows = np.zeros((case.batch, case.heads_kv, case.capacity, pool.shape[-1]), pool.dtype)
        for b, entry in np.ndindex(*table.shape):
            if 0 <= table[b, entry] < len(pool):
                rows[b, :, entry * case.page : (entry + 1) * case.page] = pool[table[b, entry]]
        given[name] = in_layout(rows, case.layout)
    return CacheTensors(dataclasses.replace(case, name=f"{case.name}_in_one_piece", page=0), given)
