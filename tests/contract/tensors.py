# SPDX-License-Identifier: Apache-2.0
"""The numbers of a case: made from its name, so every implementation and every run sees the same ones."""

from __future__ import annotations

import dataclasses
import functools
import zlib

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from contract import reference, tolerance
from contract.cases import ODD_POSITION, Case
from contract.tolerance import DTYPES

NO_LENGTH = np.array([2**31 - 1], np.int32)
"""The neutral kv_lengths."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensors:
    """Heads-first tensors of a case, rounded to its dtype; a side input that is off is None."""

    query: NDArray  # [B, Hq, Sq, D]
    key: NDArray  # [B, Hkv, Skv, D]
    value: NDArray  # [B, Hkv, Skv, Dv]
    bias: NDArray | None
    kv_lengths: NDArray[np.int32] | None
    sinks: NDArray[np.float32] | None


def seed_of(case: Case) -> int:
    """The case's seed; its name is in every test id, so a failure names its numbers."""
    return zlib.crc32(case.name.encode())


@functools.cache
def make(case: Case) -> Tensors:
    """The case's tensors; read-only, since every test shares them."""
    rng = np.random.default_rng(seed_of(case))
    dtype = DTYPES[case.dtype]
    strength = case.score_std / (abs(case.softmax_scale) * case.head_dim**0.5) if case.softmax_scale else 1.0
    query = rng.standard_normal((case.batch, case.heads_q, case.seqlen_q, case.head_dim)) * strength
    key = rng.standard_normal((case.batch, case.heads_kv, case.seqlen_kv, case.head_dim))
    value = rng.standard_normal((case.batch, case.heads_kv, case.seqlen_kv, case.dv)) + case.value_mean
    lengths = None if case.kv_lengths is None else np.array(case.kv_lengths, np.int32)
    if case.nan_past_length:
        past = reference.lengths_of_keys(lengths, case.batch, case.seqlen_kv)[:, None, None, None]
        key, value = (np.where(np.arange(case.seqlen_kv)[:, None] >= past, np.nan, x) for x in (key, value))
    if case.odd_at:
        for name in case.odd_at.split("_and_"):
            {"query": query, "key": key, "value": value}[name][0, -1, ODD_POSITION, 2] = case.odd_number
    sinks = None
    if case.sinks:
        random = rng.standard_normal(case.heads_q if case.sinks == 2 else 1)
        sinks = (3 * random + case.sink_mean).astype(np.float32)
    bias = None if case.bias_shape is None else _bias(case, case.bias_shape, rng)
    arrays = (query.astype(dtype), key.astype(dtype), value.astype(dtype), bias, lengths, sinks)
    for array in arrays:
        if array is not None:
            array.setflags(write=False)
    return Tensors(*arrays)


def _bias(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray:
    dtype = DTYPES["fp32" if case.bias_fp32 else case.dtype]
    bias = (rng.standard_normal(shape) * 2).astype(dtype)
    if case.bias_kind == "holes":
        bias[rng.random(shape) < 0.3] = -np.inf
    elif case.bias_kind == "hidden_rows":
        bias[..., ::5, :] = -np.inf
    elif case.bias_kind == "hidden_key":
        bias[..., ODD_POSITION] = -np.inf
    elif case.bias_kind == "finfo_min_row":
        bias[..., ::5, :] = ml_dtypes.finfo(dtype).min
    return bias


def formula_arguments(case: Case, tensors: Tensors) -> dict[str, object]:
    """The keyword arguments that ``reference.attention`` and ``tolerance.unfused`` take for this case."""
    return {
        "scale": case.softmax_scale,
        "softcap": case.softcap,
        "causal": case.causal,
        "diagonal": case.diagonal,
        "window_left": case.window_left,
        "window_right": case.window_right,
        "bias": tensors.bias,
        "kv_lengths": tensors.kv_lengths,
        "sinks": tensors.sinks,
    }


@functools.cache
def expected(case: Case) -> tuple[NDArray, NDArray, NDArray]:
    """The reference's output and lse, and the base of the tolerance rule."""
    tensors = make(case)
    arguments = formula_arguments(case, tensors)
    output, lse = reference.attention(tensors.query, tensors.key, tensors.value, **arguments)  # type: ignore[arg-type]
    base = tolerance.unfused(tensors.query, tensors.key, tensors.value, **arguments)  # type: ignore[arg-type]
    return output, lse, base


def node_inputs(case: Case, tensors: Tensors) -> list[NDArray]:
    """What the operator's node is fed: the case's layout, and neutral constants for side inputs that are off."""
    main = [in_layout(x, case.layout) for x in (tensors.query, tensors.key, tensors.value)]
    if case.operator == "FlashAttentionPacked":
        return [np.concatenate(main, axis=-1)]
    if case.operator == "FlashAttention":
        return main
    unread = np.nan if case.nan_where_unread else None
    bias, lengths, sinks = tensors.bias, tensors.kv_lengths, tensors.sinks
    if bias is None:
        bias = np.full((1, 1, 1, 1), 0.0 if unread is None else unread, DTYPES[case.dtype])
    if lengths is None:
        lengths = NO_LENGTH if unread is None else np.array([3], np.int32)
    if sinks is None:
        sinks = np.array([-np.inf if unread is None else unread], np.float32)
    return [*main, bias, lengths, sinks]


def in_layout(x: NDArray, layout: int) -> NDArray:
    """``[B, H, S, D]`` as ``[B, S, H*D]`` (0) or as it is (1)."""
    if layout == 1:
        return np.ascontiguousarray(x)
    batch, heads, seqlen, head_dim = x.shape
    return np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(batch, seqlen, heads * head_dim)


def heads_first(x: NDArray, layout: int, heads: int) -> NDArray:
    """The way back of ``in_layout``."""
    if layout == 1:
        return x
    batch, seqlen, joined = x.shape
    return np.swapaxes(x.reshape(batch, seqlen, heads, joined // heads), 1, 2)
