# SPDX-License-Identifier: Apache-2.0
"""The operator in float64 numpy, straight from docs/op.md: the oracle of every numeric test.

Slow and obvious on purpose. It shares no code with any implementation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def lengths_of_keys(kv_lengths: NDArray[np.int32] | None, batch: int, seqlen_kv: int) -> NDArray[np.int64]:
    """Visible keys of each batch entry, ``[B]``: all of them, or ``kv_lengths`` (``[B]`` or ``[1]``) clamped."""
    if kv_lengths is None:
        return np.full(batch, seqlen_kv, np.int64)
    return np.clip(np.broadcast_to(kv_lengths.astype(np.int64), (batch,)), 0, seqlen_kv)


def visible_keys(
    seqlen_q: int,
    seqlen_kv: int,
    lengths: NDArray[np.int64],
    *,
    causal: int = 0,
    diagonal: int = 0,
    window_left: int = -1,
    window_right: int = -1,
) -> NDArray[np.bool_]:
    """Which key each query may see, ``[B, 1, Sq, Skv]``, bias left aside.

    Query i stands at key ``i`` (diagonal 0) or ``i + length - Sq`` (diagonal 1).
    """
    visible = np.zeros((len(lengths), 1, seqlen_q, seqlen_kv), np.bool_)
    for b, length in enumerate(int(n) for n in lengths):
        for i in range(seqlen_q):
            stands_at = i + length - seqlen_q if diagonal else i
            first, last = 0, length - 1
            if causal:
                last = min(last, stands_at)
            if window_left >= 0:
                first = max(first, stands_at - window_left)
            if window_right >= 0:
                last = min(last, stands_at + window_right)
            visible[b, 0, i, first : max(last + 1, 0)] = True
    return visible


def add_odd_values(output: NDArray, probs: NDArray, value: NDArray, visible: NDArray[np.bool_]) -> None:
    """Adds NaN and infinities of ``value`` to an ``output`` without them, in the rows that see their key alone.

    Args:
        output: ``[B, H, Sq, Dv]``, changed in place.
        probs: ``[B, H, Sq, Skv]``.
        value: ``[B, H, Skv, Dv]``.
        visible: broadcastable to ``probs``.
    """
    visible = np.broadcast_to(visible, probs.shape)
    for b, h, j, d in np.argwhere(~np.isfinite(value)):
        seen = visible[b, h, :, j]
        with np.errstate(invalid="ignore"):  # 0 times an infinity
            output[b, h, seen, d] += probs[b, h, seen, j] * value[b, h, j, d]


def attention(
    query: NDArray,
    key: NDArray,
    value: NDArray,
    *,
    scale: float,
    softcap: float = 0.0,
    causal: int = 0,
    diagonal: int = 0,
    window_left: int = -1,
    window_right: int = -1,
    bias: NDArray | None = None,
    kv_lengths: NDArray[np.int32] | None = None,
    sinks: NDArray | None = None,
) -> tuple[Float64, Float64]:
    """The operator's output and log-sum-exp in float64.

    Args:
        query: ``[B, Hq, Sq, D]``, any real dtype; the numbers are taken as they are and widened.
        key: ``[B, Hkv, Skv, D]``; Hq is a multiple of Hkv.
        value: ``[B, Hkv, Skv, Dv]``.
        scale: multiplier of Q.K^T.
        softcap: 0 off; else cap * tanh(score / cap) before bias and mask.
        causal: 0 or 1.
        diagonal: 0 top-left, 1 bottom-right; for causal and windows.
        window_left: visible keys before the diagonal; -1 off.
        window_right: visible keys after the diagonal; -1 off.
        bias: rank 4, broadcastable to ``[B, Hq, Sq, Skv]``; -inf hides a key. A key that is hidden from a query has no
            part in its row, whatever its key and value hold.
        kv_lengths: ``[B]`` or ``[1]``; keys and values from there on count for nothing, whatever they hold.
        sinks: ``[Hq]`` or ``[1]``, one more score in each row's sum, without a value.

    Returns:
        output ``[B, Hq, Sq, Dv]`` and lse ``[B, Hq, Sq]`` (natural log, sink included, -inf where nothing is summed).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, heads_q, seqlen_q, _ = q.shape
    heads_kv, seqlen_kv = k.shape[1:3]
    lengths = lengths_of_keys(kv_lengths, batch, seqlen_kv)
    visible = visible_keys(
        seqlen_q,
        seqlen_kv,
        lengths,
        causal=causal,
        diagonal=diagonal,
        window_left=window_left,
        window_right=window_right,
    )
    beyond = np.arange(seqlen_kv)[None, None, :, None] >= lengths[:, None, None, None]
    k, v = np.where(beyond, 0.0, k), np.where(beyond, 0.0, v)
    group = heads_q // heads_kv
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)

    with np.errstate(invalid="ignore"):  # infinities of either sign
        scores = scale * (q @ np.swapaxes(k, -1, -2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        b = np.broadcast_to(np.asarray(bias, np.float64), scores.shape)
        visible = visible & (b != -np.inf)
        scores = scores + np.where(visible, b, 0.0)
    scores = np.where(visible, scores, -np.inf)

    sink = np.full((1, heads_q, 1, 1), -np.inf)
    if sinks is not None:
        sink[...] = np.asarray(sinks, np.float64).reshape(1, -1, 1, 1)
    row_max = np.maximum(np.max(scores, axis=-1, keepdims=True, initial=-np.inf), sink)
    # A row that sums nothing has a maximum of -inf, and (-inf) - (-inf) is NaN: any finite number serves there.
    row_max = np.where(row_max == -np.inf, 0.0, row_max)
    with np.errstate(invalid="ignore"):
        probs = np.exp(scores - row_max)
    row_sum = probs.sum(axis=-1, keepdims=True) + np.exp(sink - row_max)
    output = probs @ np.where(np.isfinite(v), v, 0.0)
    add_odd_values(output, probs, v, visible)
    output /= np.where(row_sum == 0.0, 1.0, row_sum)
    with np.errstate(divide="ignore"):
        lse = np.log(row_sum) + row_max
    return output, lse[..., 0]
