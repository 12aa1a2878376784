# SPDX-License-Identifier: Apache-2.0
"""A cache form as the kernels' doors take it: the append's arguments, then the attention's, on the same buffers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.cache_cases import CacheTensors
from contract.emulated_library import KERNEL_DTYPES, FlashAppendArgs, FlashAttentionArgs, FlashTensor
from contract.tensors import in_layout
from contract.tolerance import DTYPES


def tensor(array: NDArray, layout: int, heads: int) -> FlashTensor:
    """Address and strides of query, keys, values or a cache; of a paged one the batch stride is from page to page."""
    if layout == 1:
        _, _, seqlen, head_dim = array.shape
        return FlashTensor(array.ctypes.data, heads * seqlen * head_dim, seqlen * head_dim, head_dim)
    _, seqlen, joined = array.shape
    return FlashTensor(array.ctypes.data, seqlen * joined, joined // heads, joined)


class Launch:
    """Both calls' arguments; ``outputs`` are full of NaN until written, and the caches are those of ``tensors``."""

    def __init__(self, tensors: CacheTensors) -> None:
        case, given = tensors.case, tensors.given
        shape = (case.batch, case.heads_q, case.seqlen_q)
        self.outputs = {
            "output": in_layout(np.full((*shape, case.v_head_dim), np.nan, DTYPES[case.dtype]), case.layout),
            "lse": np.full(shape, np.nan, np.float32),
            "kv_lengths_out": np.full(case.batch, -1, np.int32),
            "key_cache_out": given["key_cache"],
            "value_cache_out": given["value_cache"],
        }
        self._tensors = tensors  # its arrays are what the arguments point to
        self.append, self.attention = self._append(), self._attention()

    def _shared(self) -> dict[str, object]:
        case, given = self._tensors.case, self._tensors.given
        shared: dict[str, object] = {
            "dtype": KERNEL_DTYPES[case.dtype], "batch": case.batch, "kv_num_heads": case.heads_kv,
            "head_dim": case.head_dim, "v_head_dim": case.v_head_dim,
        }  # fmt: skip
        if case.page:
            shared |= {"page_size": case.page, "page_count": len(given["key_cache"])}
            shared |= {"page_table": given["page_table"].ctypes.data, "page_table_stride": given["page_table"].shape[1]}
        return shared

    def _append(self) -> FlashAppendArgs:
        case, given = self._tensors.case, self._tensors.given
        named = ("key", "value", "key_cache", "value_cache")
        return FlashAppendArgs(
            **self._shared(),
            **{name: tensor(given[name], case.layout, case.heads_kv) for name in named},
            seqlen_new=case.new,
            capacity=case.capacity,
            kv_lengths=given["kv_lengths"].ctypes.data,
            kv_lengths_stride=int(not case.one_length),
            lengths_after=self.outputs["kv_lengths_out"].ctypes.data,
        )

    def _attention(self) -> FlashAttentionArgs:
        case, given = self._tensors.case, self._tensors.given
        numbers = ("scale", "softcap", "causal", "diagonal", "window_left", "window_right")
        arguments = FlashAttentionArgs(
            **self._shared(),
            **{name: case.attributes()[name] for name in numbers},
            q_num_heads=case.heads_q,
            seqlen_q=case.seqlen_q,
            seqlen_kv=case.capacity,
            query=tensor(given["query"], case.layout, case.heads_q),
            key=tensor(given["key_cache"], case.layout, case.heads_kv),
            value=tensor(given["value_cache"], case.layout, case.heads_kv),
            output=tensor(self.outputs["output"], case.layout, case.heads_q),
            kv_lengths=self.outputs["kv_lengths_out"].ctypes.data,
            kv_lengths_stride=1,
            lse=self.outputs["lse"].ctypes.data,
        )
        if case.bias:
            bias = given["bias"]
            strides = [0 if n == 1 else s // bias.itemsize for n, s in zip(bias.shape, bias.strides, strict=True)]
            arguments.bias, arguments.bias_dtype = bias.ctypes.data, KERNEL_DTYPES[case.dtype]
            arguments.bias_stride = type(arguments.bias_stride)(*strides)
        if case.sinks:
            arguments.sinks, arguments.sinks_stride = given["sinks"].ctypes.data, 1
        return arguments
