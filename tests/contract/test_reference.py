# SPDX-License-Identifier: Apache-2.0
"""The float64 reference against PyTorch and against what each option means in other words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contract.reference import attention

SCALE = 0.3


def tensors(heads_kv: int = 4, seqlen_q: int = 7, seqlen_kv: int = 11) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query, key and value in float64; Dv differs from D."""
    rng = np.random.default_rng(7)
    query = rng.standard_normal((2, 4, seqlen_q, 5)) * 3
    return query, rng.standard_normal((2, heads_kv, seqlen_kv, 5)), rng.standard_normal((2, heads_kv, seqlen_kv, 3))


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("causal", [0, 1])
def test_it_is_pytorchs_attention(heads_kv: int, causal: int) -> None:
    query, key, value = tensors(heads_kv)
    output, _ = attention(query, key, value, scale=SCALE, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x) for x in (query, key, value)), scale=SCALE, is_causal=bool(causal), enable_gqa=True
    )
    np.testing.assert_allclose(output, expected.numpy(), rtol=1e-12, atol=1e-13)


def test_lse_is_the_logarithm_of_the_sum_of_exponentials() -> None:
    query, key, value = tensors()
    _, lse = attention(query, key, value, scale=SCALE)
    scores = SCALE * np.einsum("bhid,bhjd->bhij", query, key)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=1e-12)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(7, 11), (11, 7), (1, 9)])
def test_bottom_right_causal_is_pytorchs_lower_right_mask(seqlen_q: int, seqlen_kv: int) -> None:
    query, key, value = tensors(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    visible = np.tril(np.ones((seqlen_q, seqlen_kv), bool), seqlen_kv - seqlen_q)
    bias = np.where(visible, 0.0, -np.inf)[None, None]
    by_mask = attention(query, key, value, scale=SCALE, bias=bias)
    for got, expected in zip(attention(query, key, value, scale=SCALE, causal=1, diagonal=1), by_mask, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_window_is_a_band_around_the_diagonal() -> None:
    query, key, value = tensors()
    distance = np.arange(11)[None, :] - np.arange(7)[:, None]
    bias = np.where((distance >= -2) & (distance <= 1), 0.0, -np.inf)[None, None]
    got, _ = attention(query, key, value, scale=SCALE, window_left=2, window_right=1)
    np.testing.assert_array_equal(got, attention(query, key, value, scale=SCALE, bias=bias)[0])


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("diagonal", [0, 1])
def test_lengths_cut_keys_and_values_off(causal: int, diagonal: int) -> None:
    query, key, value = tensors()
    lengths = np.array([9, 4], np.int32)
    got, _ = attention(query, key, value, scale=SCALE, kv_lengths=lengths, causal=causal, diagonal=diagonal)
    for b, n in enumerate(lengths):
        only = [x[b : b + 1, :, :n] for x in (key, value)]
        expected, _ = attention(query[b : b + 1], *only, scale=SCALE, causal=causal, diagonal=diagonal)
        np.testing.assert_allclose(got[b : b + 1], expected, rtol=1e-13)


def test_a_sink_is_a_key_without_a_value() -> None:
    query, key, value = tensors()
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    got, lse = attention(query, key, value, scale=SCALE, sinks=sinks)
    scores = SCALE * np.einsum("bhid,bhjd->bhij", query, key)
    column = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    weights = np.exp(np.concatenate([scores, column], -1))
    np.testing.assert_allclose(lse, np.log(weights.sum(-1)), rtol=1e-12)
    expected = np.einsum("bhij,bhjd->bhid", weights[..., :-1] / weights.sum(-1, keepdims=True), value)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_softcap_comes_before_the_bias() -> None:
    query, key, value = tensors()
    bias = np.random.default_rng(3).standard_normal((1, 4, 7, 11)) * 9
    got, _ = attention(query, key, value, scale=SCALE, softcap=2.0, bias=bias)
    scores = 2.0 * np.tanh(SCALE * np.einsum("bhid,bhjd->bhij", query, key) / 2.0) + bias
    expected = torch.softmax(torch.from_numpy(scores), -1).numpy() @ value
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_a_row_without_a_key_is_zero_and_its_lse_minus_infinity_or_the_sink() -> None:
    query, key, value = tensors(seqlen_q=11, seqlen_kv=7)
    output, lse = attention(query, key, value, scale=SCALE, causal=1, diagonal=1)
    assert (output[:, :, :4] == 0).all()
    assert (output[:, :, 4:] != 0).all()
    assert (lse[:, :, :4] == -np.inf).all()
    assert np.isfinite(lse[:, :, 4:]).all()
    _, lse = attention(query, key, value, scale=SCALE, causal=1, diagonal=1, sinks=np.array([2.5]))
    np.testing.assert_array_equal(lse[:, :, :4], 2.5)


def test_a_row_of_the_lowest_finite_number_is_the_mean_of_the_values() -> None:
    query, key, value = tensors()
    bias = np.full((1, 1, 7, 11), np.finfo(np.float32).min)
    output, _ = attention(query, key, value, scale=SCALE, bias=bias)
    np.testing.assert_allclose(output, np.broadcast_to(value.mean(2, keepdims=True), output.shape), rtol=1e-12)


def test_nothing_past_a_length_leaks_and_nan_before_it_shows() -> None:
    query, key, value = tensors()
    for poisoned in (key, value):
        poisoned[:, :, 6:] = np.nan
    output, lse = attention(query, key, value, scale=SCALE, kv_lengths=np.array([6], np.int32))
    assert np.isfinite(output).all()
    assert np.isfinite(lse).all()
    output, _ = attention(query, key, value, scale=SCALE, kv_lengths=np.array([7], np.int32))
    assert np.isnan(output).all()


def test_no_keys_give_zeros_and_no_queries_nothing() -> None:
    query, key, value = tensors()
    output, lse = attention(query, key[:, :, :0], value[:, :, :0], scale=SCALE)
    assert output.shape == (2, 4, 7, 3)
    assert (output == 0).all()
    assert (lse == -np.inf).all()
    output, lse = attention(query[:, :, :0], key, value, scale=SCALE, causal=1)
    assert output.shape == (2, 4, 0, 3)
    assert lse.shape == (2, 4, 0)
