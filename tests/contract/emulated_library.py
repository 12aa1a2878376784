# SPDX-License-Identifier: Apache-2.0
"""The kernels' door (plugin/kernels/flash_attention.h) on a CPU: the emulated build, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.cases import Case
from contract.tensors import Tensors, in_layout, node_inputs
from contract.tolerance import DTYPES

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native"
LIBRARY = "libflash_attention_emulated.so"
KERNEL_DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2}


class FlashTensor(ctypes.Structure):
    """``struct FlashTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


class FlashAttentionArgs(ctypes.Structure):
    """``struct FlashAttentionArgs``, field for field; test_operator_page.py compares it with the header."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("q_num_heads", ctypes.c_int32),
        ("kv_num_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("v_head_dim", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_kv", ctypes.c_int64),
        ("query", FlashTensor),
        ("key", FlashTensor),
        ("value", FlashTensor),
        ("output", FlashTensor),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("diagonal", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("bias", ctypes.c_void_p),
        ("bias_dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("bias_stride", ctypes.c_int64 * 4),
        ("kv_lengths", ctypes.c_void_p),
        ("kv_lengths_stride", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("sinks_stride", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_kv", ctypes.c_void_p),
        ("total_q", ctypes.c_int64),
        ("total_kv", ctypes.c_int64),
        ("page_table", ctypes.c_void_p),
        ("page_table_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int32),
        ("page_count", ctypes.c_int32),
    )


class FlashAppendArgs(ctypes.Structure):
    """``struct FlashAppendArgs``, field for field."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("kv_num_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("v_head_dim", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("page_count", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("seqlen_new", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("key", FlashTensor),
        ("value", FlashTensor),
        ("key_cache", FlashTensor),
        ("value_cache", FlashTensor),
        ("kv_lengths", ctypes.c_void_p),
        ("kv_lengths_stride", ctypes.c_int64),
        ("lengths_after", ctypes.c_void_p),
        ("cu_seqlens_new", ctypes.c_void_p),
        ("total_new", ctypes.c_int64),
        ("page_table", ctypes.c_void_p),
        ("page_table_stride", ctypes.c_int64),
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The emulated kernels of the native build tree.

    Raises:
        FileNotFoundError: they are not built; the text says how to.
    """
    found = sorted(BUILD.rglob(LIBRARY))
    if not found:
        raise FileNotFoundError(
            f"{LIBRARY} is not in {BUILD.relative_to(ROOT)}; build it with: "
            "cmake -S . -B build/native -G Ninja -DFLASH_EXPORT_TESTS=ON && cmake --build build/native"
        )
    library = ctypes.CDLL(str(found[0]))
    arguments = ctypes.POINTER(FlashAttentionArgs)
    library.flashAttentionWhyUnsupported.argtypes = [arguments, ctypes.c_char_p, ctypes.c_size_t]
    library.flashAttentionWhyUnsupported.restype = ctypes.c_int32
    library.flashAttentionWorkspace.argtypes = [arguments]
    library.flashAttentionWorkspace.restype = ctypes.c_size_t
    library.flashAttentionLaunch.argtypes = [arguments, ctypes.c_void_p, ctypes.c_void_p]
    library.flashAttentionLaunch.restype = ctypes.c_int32
    library.flashEmulationError.argtypes = []
    library.flashEmulationError.restype = ctypes.c_char_p
    return library


def why_unsupported(arguments: FlashAttentionArgs) -> list[str]:
    """The kernels' own reasons against a problem."""
    text = ctypes.create_string_buffer(4096)
    count = load().flashAttentionWhyUnsupported(ctypes.byref(arguments), text, len(text))
    return text.value.decode().split("\n")[:count] if count else []


class Problem:
    """A case as the kernels take it: buffers in the case's layout, outputs full of NaN until written."""

    def __init__(self, case: Case, tensors: Tensors) -> None:
        self.case = case
        dtype = DTYPES[case.dtype]
        shape = (case.batch, case.heads_q, case.seqlen_q)
        self.output = in_layout(np.full((*shape, case.dv), np.nan, dtype), case.layout)
        self.lse = np.full(shape, np.nan, np.float32) if case.operator == "FlashAttentionEx" else None
        self._inputs = node_inputs(case, tensors)
        self.arguments = self._arguments(tensors)

    def launch(self) -> None:
        """Runs the kernels.

        Raises:
            RuntimeError: they report a cudaError_t; with what the emulation found and the seed that repeats it.
        """
        library, reference = load(), ctypes.byref(self.arguments)
        workspace = np.empty(library.flashAttentionWorkspace(reference), np.uint8)
        address = workspace.ctypes.data if workspace.size else None
        if status := library.flashAttentionLaunch(reference, address, None):
            raise RuntimeError(f"cudaError {status}: {library.flashEmulationError().decode()}")

    def _arguments(self, tensors: Tensors) -> FlashAttentionArgs:
        case = self.case
        arguments = FlashAttentionArgs(
            dtype=KERNEL_DTYPES[case.dtype],
            batch=case.batch,
            q_num_heads=case.heads_q,
            kv_num_heads=case.heads_kv,
            head_dim=case.head_dim,
            v_head_dim=case.dv,
            seqlen_q=case.seqlen_q,
            seqlen_kv=case.seqlen_kv,
            output=_tensor(self.output, case.layout, case.heads_q),
            scale=case.softmax_scale,
            softcap=case.softcap,
            causal=case.causal,
            diagonal=case.diagonal,
            window_left=case.window_left,
            window_right=case.window_right,
            lse=None if self.lse is None else self.lse.ctypes.data,
        )
        arguments.query, arguments.key, arguments.value = self._query_key_value()
        self._add_side_inputs(arguments, tensors)
        return arguments

    def _query_key_value(self) -> tuple[FlashTensor, FlashTensor, FlashTensor]:
        case = self.case
        if case.operator != "FlashAttentionPacked":
            heads = (case.heads_q, case.heads_kv, case.heads_kv)
            query, key, value = (_tensor(a, case.layout, h) for a, h in zip(self._inputs, heads, strict=False))
            return query, key, value
        qkv = self._inputs[0]
        first_heads = (0, case.heads_q, case.heads_q + case.heads_kv)
        strides = (qkv.shape[1] * qkv.shape[2], case.head_dim, qkv.shape[2])
        start, head_bytes = qkv.ctypes.data, case.head_dim * qkv.itemsize
        query, key, value = (FlashTensor(start + head * head_bytes, *strides) for head in first_heads)
        return query, key, value

    def _add_side_inputs(self, arguments: FlashAttentionArgs, tensors: Tensors) -> None:
        case = self.case
        if tensors.bias is not None:
            bias = tensors.bias
            arguments.bias = bias.ctypes.data
            arguments.bias_dtype = KERNEL_DTYPES["fp32" if bias.dtype == np.float32 else case.dtype]
            strides = [0 if n == 1 else s // bias.itemsize for n, s in zip(bias.shape, bias.strides, strict=True)]
            arguments.bias_stride = (ctypes.c_int64 * 4)(*strides)
        if tensors.kv_lengths is not None:
            arguments.kv_lengths = tensors.kv_lengths.ctypes.data
            arguments.kv_lengths_stride = int(len(tensors.kv_lengths) > 1)
        if tensors.sinks is not None:
            arguments.sinks = tensors.sinks.ctypes.data
            arguments.sinks_stride = int(len(tensors.sinks) > 1)


def _tensor(array: NDArray, layout: int, heads: int) -> FlashTensor:
    """Address and strides, in elements, of a tensor in either layout."""
    if layout == 1:
        _, _, seqlen, head_dim = array.shape
        return FlashTensor(array.ctypes.data, heads * seqlen * head_dim, seqlen * head_dim, head_dim)
    _, seqlen, joined = array.shape
    return FlashTensor(array.ctypes.data, seqlen * joined, joined // heads, joined)
