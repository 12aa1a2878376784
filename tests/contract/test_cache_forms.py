# SPDX-License-Identifier: Apache-2.0
"""The body of the cache forms as docs/op.md writes it, in numpy, against the kernels' append."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from contract import emulated_library
from contract.emulated_library import FlashAppendArgs, FlashTensor

HEADS, HEAD_DIM, PAGE, WIDTH, NEW = 2, 8, 16, 3, 5
CAPACITY = PAGE * WIDTH


def body(
    new: NDArray, cache: NDArray, kv_lengths: NDArray[np.int32], page_table: NDArray[np.int32] | None
) -> tuple[NDArray, NDArray]:
    """Steps 1 to 5 in layout 1: the cache and the lengths that come out."""
    before = np.clip(kv_lengths, 0, CAPACITY)
    rows = cache
    if page_table is not None:
        pages = cache[page_table]  # [B, W, H, T, D]
        rows = pages.transpose(0, 2, 1, 3, 4).reshape(len(page_table), HEADS, CAPACITY, HEAD_DIM)
    index = np.arange(CAPACITY)[None] - before[:, None]
    fresh = (index >= 0) & (index < NEW)
    gathered = np.take_along_axis(new, np.clip(index, 0, NEW - 1)[:, None, :, None], axis=2)
    rows = np.where(fresh[:, None, :, None], gathered, rows)
    after = np.minimum(before + NEW, CAPACITY).astype(np.int32)
    if page_table is None:
        return rows, after
    out = cache.copy()
    pages = rows.reshape(len(rows), HEADS, WIDTH, PAGE, HEAD_DIM).transpose(0, 2, 1, 3, 4)
    got_one = fresh.reshape(len(rows), WIDTH, PAGE).any(-1)
    out[page_table[got_one]] = pages[got_one]
    return out, after


def view(array: NDArray) -> FlashTensor:
    outer, row = array.strides[0] // array.itemsize, array.strides[2] // array.itemsize
    return FlashTensor(array.ctypes.data, outer, array.strides[1] // array.itemsize, row)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_kernels_append_as_the_page_says(dtype: str, *, paged: bool) -> None:
    random = np.random.default_rng(7)
    numbers = {"fp32": np.float32, "fp16": np.float16}[dtype]
    lengths = np.array([0, 14, 45, -3], np.int32)  # two of five rows find no room behind 45
    batch = len(lengths)
    shape = (batch * WIDTH, HEADS, PAGE, HEAD_DIM) if paged else (batch, HEADS, CAPACITY, HEAD_DIM)
    cache = random.standard_normal(shape).astype(numbers)
    new = random.standard_normal((batch, HEADS, NEW, HEAD_DIM)).astype(numbers)
    table = random.permutation(batch * WIDTH).reshape(batch, WIDTH).astype(np.int32) if paged else None
    wanted, wanted_lengths = body(new, cache, lengths, table)
    values, after = cache.copy(), np.full(batch, -1, np.int32)
    arguments = FlashAppendArgs(
        dtype=emulated_library.KERNEL_DTYPES[dtype], batch=batch, kv_num_heads=HEADS, head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM, seqlen_new=NEW, capacity=CAPACITY, key=view(new), value=view(new), key_cache=view(cache),
        value_cache=view(values), kv_lengths=lengths.ctypes.data, kv_lengths_stride=1, lengths_after=after.ctypes.data,
    )  # fmt: skip
    if table is not None:
        arguments.page_size, arguments.page_count = PAGE, len(cache)
        arguments.page_table, arguments.page_table_stride = table.ctypes.data, WIDTH
    append = emulated_library.load().flashAttentionAppend
    append.argtypes = [ctypes.POINTER(FlashAppendArgs), ctypes.c_void_p]
    assert append(ctypes.byref(arguments), None) == 0
    np.testing.assert_array_equal(cache, wanted)
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(after, wanted_lengths)
