# SPDX-License-Identifier: Apache-2.0
"""What gpu_check.py times of decoding over a paged cache: the same keys in pages, and behind each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from contract.emulated_library import KERNEL_DTYPES, FlashAttentionArgs
from gpu_check_caches import Door, view


@dataclasses.dataclass(frozen=True, slots=True)
class PagedDecode:
    """A step of decoding: one query a sequence, ``keys`` keys each, in pages of ``page_size``."""

    dtype: str
    batch: int
    heads: int
    heads_kv: int
    keys: int
    head_dim: int
    page_size: int

    def __str__(self) -> str:
        heads = f"H{self.heads}/{self.heads_kv}"
        return f"{self.dtype} decode B{self.batch} {heads} S{self.keys} D{self.head_dim} in pages of {self.page_size}"

    def rate(self, ms: float) -> str:
        """GB/s of keys and values."""
        size = 2.0 * self.batch * self.heads_kv * self.keys * self.head_dim * (4 if self.dtype == "fp32" else 2)
        return f"{size / ms / 1e6:9.1f} GB/s   "


TIMED = [PagedDecode("fp16", 16, 32, 8, 4096, 128, size) for size in (16, 64, 256)]
TIMED.append(PagedDecode("bf16", 8, 16, 16, 8192, 64, 16))
TIMED_ON_HOST = [PagedDecode("fp16", 2, 4, 2, 150, 16, 16)]


class Step:
    """One step's tensors, with two ways to run it; pages are shuffled over the pool."""

    def __init__(self, door: Door, case: PagedDecode, seed: int) -> None:
        self._door, self._case = door, case
        pages = -(-case.keys // case.page_size)
        order = torch.randperm(case.batch * pages, generator=torch.Generator().manual_seed(seed))
        self._table = order.to(torch.int32).to(door.place).reshape(case.batch, pages)
        self._query = door.normal((case.batch, 1, case.heads, case.head_dim), case.dtype, seed)
        pool = (case.batch * pages, case.page_size, case.heads_kv, case.head_dim)
        self._pools = [door.normal(pool, case.dtype, seed + i) for i in (1, 2)]
        rows = (case.batch, pages * case.page_size, case.heads_kv, case.head_dim)
        self._rows = [pool[self._table.long()].reshape(rows) for pool in self._pools]
        self._kept: list[torch.Tensor] = []
        self.outputs = {
            way: torch.full_like(self._query, math.nan) for way in ("paged", "contiguous")
        }  # NaN: what is not written shows

    def call(self, way: str) -> Callable[[], None]:
        """Enqueues the step over the ``paged`` or the ``contiguous`` cache."""
        case = self._case
        key, value = self._pools if way == "paged" else self._rows
        arguments = FlashAttentionArgs(
            dtype=KERNEL_DTYPES[case.dtype], batch=case.batch, q_num_heads=case.heads, kv_num_heads=case.heads_kv,
            head_dim=case.head_dim, v_head_dim=case.head_dim, seqlen_q=1, seqlen_kv=case.keys,
            query=view(self._query), key=view(key), value=view(value), output=view(self.outputs[way]),
            scale=case.head_dim**-0.5, causal=1, diagonal=1, window_left=-1, window_right=-1,
        )  # fmt: skip
        if way == "paged":
            arguments.page_table, arguments.page_table_stride = self._table.data_ptr(), self._table.shape[1]
            arguments.page_size, arguments.page_count = case.page_size, key.shape[0]
        workspace = self._door.workspace(arguments)
        self._kept.append(workspace)
        return lambda: self._door.enqueue(arguments, workspace)

    def why_wrong(self) -> list[str]:
        """Both ways must give the same bits, and numbers."""
        paged, contiguous = (self.outputs[way] for way in ("paged", "contiguous"))
        same = bool(torch.equal(paged, contiguous)) and bool(torch.isfinite(paged).all())
        return [] if same else ["the paged cache gives other bits than the same keys behind each other"]
