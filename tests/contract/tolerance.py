# SPDX-License-Identifier: Apache-2.0
"""The one rule by which an implementation's numbers are accepted.

On the same rounded inputs, ``ref`` is attention in float64 and ``base`` the plain unfused formula wholly in the test
dtype. An output may be off by twice what ``base`` is off, plus two units in the last place (the 2x rule of
FlashAttention's own tests, github.com/Dao-AILab/flash-attention): no tolerance is guessed.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from contract.reference import add_odd_values, lengths_of_keys, visible_keys

DTYPES: dict[str, np.dtype] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
POOLED_AT_LEAST = 1024
"""The mean rule is a statement about many outputs; below this many only the maximum counts."""


def unfused(
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
) -> NDArray:
    """``base``: the unfused formula as a framework runs it in the query's dtype, the scale applied to the key.

    Every operator's result is rounded to the dtype; inside a matrix product or a softmax fp32 accumulates, as on a
    GPU. An fp32 bias keeps the sum and its softmax in fp32, as type promotion does. Shapes as ``reference.attention``.
    """
    dtype = query.dtype

    def rounded(x: NDArray) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            return np.asarray(x, np.float32).astype(dtype).astype(np.float32)

    batch, heads_q, seqlen_q, _ = query.shape
    heads_kv, seqlen_kv = key.shape[1:3]
    lengths = lengths_of_keys(kv_lengths, batch, seqlen_kv)
    beyond = np.arange(seqlen_kv)[None, None, :, None] >= lengths[:, None, None, None]
    q, k, v = (np.asarray(x, np.float32) for x in (query, key, value))
    k, v = (np.repeat(np.where(beyond, np.float32(0), x), heads_q // heads_kv, axis=1) for x in (k, v))

    scores = rounded(_product(q, np.swapaxes(rounded(k * np.float32(scale)), -1, -2)))
    if softcap:
        cap = np.float32(softcap)
        scores = rounded(rounded(np.tanh(rounded(scores / cap))) * cap)
    visible = visible_keys(
        seqlen_q,
        seqlen_kv,
        lengths,
        causal=causal,
        diagonal=diagonal,
        window_left=window_left,
        window_right=window_right,
    )
    if bias is not None:
        b = np.broadcast_to(np.asarray(bias, np.float32), scores.shape)
        visible = visible & (b != -np.inf)
        total = scores + np.where(visible, b, np.float32(0))
        scores = total if bias.dtype == np.float32 else rounded(total)
    scores = np.where(visible, scores, np.float32(-np.inf))

    sink = np.full((1, heads_q, 1, 1), -np.inf, np.float32)
    if sinks is not None:
        sink[...] = np.asarray(sinks, np.float32).reshape(1, -1, 1, 1)
    row_max = np.maximum(np.max(scores, axis=-1, keepdims=True, initial=-np.inf), sink)
    row_max = np.where(row_max == -np.inf, np.float32(0), row_max)
    with np.errstate(invalid="ignore"):  # a visible score may be infinite
        probs = np.exp(scores - row_max)
    row_sum = probs.sum(axis=-1, keepdims=True, dtype=np.float32) + np.exp(sink - row_max)
    probs = rounded(probs / np.where(row_sum == 0, np.float32(1), row_sum))
    output = _product(probs, np.where(np.isfinite(v), v, np.float32(0)))
    add_odd_values(output, probs, v, visible)
    return rounded(output).astype(dtype)


def _product(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Batched matrix product, summed in fp32 in index order as the plainest kernel does.

    A BLAS sums in lanes, which halves the error of long sums: an fp32 kernel would be judged by another's luck.
    """
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for i in range(a.shape[-1]):
        total += a[..., i, None] * b[..., i, None, :]
    return total


def unit_in_last_place(reference: NDArray[np.float64], dtype: DTypeLike) -> float:
    """The largest rounding step seen when 0.3 is added to the reference and taken away again, in ``dtype``."""
    r = reference.astype(dtype)
    r = r[np.isfinite(r.astype(np.float64))]
    if not r.size:
        return 0.0
    shift = np.asarray(0.3, dtype)
    return float(np.max(np.abs((((r + shift) - shift) - r).astype(np.float64))))


def why_rejected(output: NDArray, reference: NDArray[np.float64], base: NDArray, *, softcap: float = 0.0) -> list[str]:
    """Why ``output`` is not accepted, one sentence a reason with its numbers; empty: accepted.

    Args:
        output: what the implementation gave, in the test dtype.
        reference: ``reference.attention`` of the same rounded inputs.
        base: ``unfused`` of the same inputs; its dtype is the test dtype.
        softcap: the case's; with one, three times the base's error is allowed instead of twice.
    """
    if output.shape != reference.shape:
        return [f"shape {output.shape}, not {reference.shape}"]
    if output.dtype != base.dtype:
        return [f"dtype {output.dtype}, not {base.dtype}"]
    got, plain = output.astype(np.float64), base.astype(np.float64)
    reasons = _odd_values(got, reference)
    finite = np.isfinite(got) & np.isfinite(reference)
    if not finite.any():
        return reasons
    if not np.isfinite(plain[finite]).all():
        return [*reasons, "the base overflows here, so the rule says nothing: choose smaller inputs"]
    got, ref, plain = got[finite], reference[finite], plain[finite]
    error, allowed_error = np.abs(got - ref), np.abs(plain - ref)

    factor, ulp = (3.0 if softcap else 2.0), unit_in_last_place(ref, base.dtype)
    limit = factor * float(allowed_error.max()) + 2.0 * ulp
    if error.max() > limit:
        reasons.append(
            f"max error {error.max():.3e} > {limit:.3e} ({factor:g} x base {allowed_error.max():.3e} + 2 ulp)"
        )
    if error.size >= POOLED_AT_LEAST:
        mean_ulp = float(np.spacing(np.asarray(np.abs(ref).mean(), base.dtype)))
        limit = 1.5 * float(allowed_error.mean()) + mean_ulp
        if error.mean() > limit:
            reasons.append(f"mean error {error.mean():.3e} > {limit:.3e} (1.5 x base {allowed_error.mean():.3e} + ulp)")
    return reasons


def why_lse_rejected(lse: NDArray, reference: NDArray[np.float64]) -> list[str]:
    """Why a log-sum-exp is not accepted: more than max(1e-3, 4 fp32 ulp) off, or another infinity."""
    if lse.shape != reference.shape:
        return [f"lse shape {lse.shape}, not {reference.shape}"]
    if lse.dtype != np.float32:
        return [f"lse dtype {lse.dtype}, not float32"]
    reasons = [f"lse: {reason}" for reason in _odd_values(lse.astype(np.float64), reference)]
    finite = np.isfinite(lse) & np.isfinite(reference)
    if finite.any():
        ref = reference[finite]
        with np.errstate(over="ignore"):  # beside finfo.min one step is infinite, and so is the limit
            limit = np.maximum(1e-3, 4.0 * np.spacing(np.abs(ref).astype(np.float32)).astype(np.float64))
        excess = np.abs(lse[finite].astype(np.float64) - ref) / limit
        if excess.max() > 1.0:
            reasons.append(f"lse error is {excess.max():.3g} times the limit of max(1e-3, 4 ulp)")
    return reasons


def _odd_values(got: NDArray[np.float64], reference: NDArray[np.float64]) -> list[str]:
    """NaN and infinities must stand exactly where the reference has them."""
    reasons = []
    if (count := int(np.sum(np.isnan(got) != np.isnan(reference)))) > 0:
        reasons.append(f"NaN in {int(np.isnan(got).sum())} places, {int(np.isnan(reference).sum())} wanted")
    infinite = np.isinf(got) | np.isinf(reference)
    if not count and (wrong := int(np.sum(got[infinite] != reference[infinite]))) > 0:
        reasons.append(f"{wrong} infinities differ")
    return reasons
