# SPDX-License-Identifier: Apache-2.0
"""Odd settings of ONNX Runtime's operators are read as its kernels read them, or refused; no export ends with 1."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import onnx
import pytest
from exporter import test_optimized as optimized
from exporter.patterns.test_contrib import GQA, HEADS, QKV, SELF, H, X, model
from exporter.patterns.test_contrib_cache import grouped

from flash_export import accept, check_site, pipeline
from flash_export.errors import NumbersDiffer
from flash_export.options import Options
from flash_export.patterns import contrib_multihead
from flash_export.sites import Site
from flash_export.talk import Talk

UNEQUAL = "float[B, S, 32] q, float[B, T, 32] k, float[B, T, 12] v"
PADDED = f"{SELF}, int32[B, S] m, float[1, {H}, S, S] bias"
TABLES = ", float[400, 8] c, float[400, 8] s"


def multihead(attributes: str, inputs: str, more: str = "") -> onnx.ModelProto:
    return model(f"MultiHeadAttention <num_heads = {H}{attributes}> (q, k, v{more})", inputs)


def products(first: str, second: str) -> onnx.ModelProto:
    return optimized.parse(
        f"main ({optimized.HEADS_FIRST}) => ({optimized.OUT}) {{\n"
        f" s = FusedMatMul <alpha = {first}, transB = 1> (q, k)\n p = Softmax <axis = -1> (s)\n"
        f" o = FusedMatMul <alpha = {second}> (p, v) }}"
    )


FORMS = {
    "mask_and_bias": (multihead("", f"{QKV}, int32[B, T] m, float[1, {H}, S, T] bias", ", , m, bias"), "fused"),
    "lengths_and_bias": (multihead("", f"{QKV}, int32[B] m, float[1, {H}, S, T] bias", ", , m, bias"), "fused"),
    "causal_mask_and_bias": (multihead(", unidirectional = 1", PADDED, ", , m, bias"), "fused"),
    "causal_between_unequal_lengths": (multihead(", unidirectional = 1", UNEQUAL), "causal_alignment"),
    "causal_of_one_query": (multihead(", unidirectional = 1", UNEQUAL.replace("S", "1")), "causal_alignment"),
    "causal_of_more_queries": (
        multihead(", unidirectional = 1", UNEQUAL.replace("S", "9").replace("T", "5")),
        "fused",
    ),
    "causal_of_fewer_queries": (
        multihead(", unidirectional = 1", UNEQUAL.replace("S", "5").replace("T", "9")),
        "causal_alignment",
    ),
    "unidirectional_2": (multihead(", unidirectional = 2", SELF), "fused"),
    "unidirectional_-1": (multihead(", unidirectional = -1", SELF), "fused"),
    "packed_weights_unidirectional_2": (
        model(f"Attention <num_heads = {H}, unidirectional = 2> (x, w, b)", X),
        "fused",
    ),
    "window_0": (
        model(f"GroupQueryAttention <{HEADS}, local_window_size = 0> (q, k, v, , , last, total)", GQA),
        "attribute_range",
    ),
    "window_-2": (
        model(f"GroupQueryAttention <{HEADS}, local_window_size = -2> (q, k, v, , , last, total)", GQA),
        "fused",
    ),
    "do_rotary_2": (grouped("do_rotary = 2", ", c, s", TABLES), "fused"),
    "interleaved_2": (grouped("do_rotary = 1, rotary_interleaved = 2", ", c, s", TABLES), "fused"),
    "smooth_softmax_2": (
        model(f"GroupQueryAttention <{HEADS}, smooth_softmax = 2> (q, k, v, , , last, total)", GQA),
        "fused",
    ),
    "huge_scale": (products("1.0e38", "1.0"), "attribute_range"),
    "huge_weight": (products("0.3", "1.0e38"), "attribute_range"),
    "negative_weight": (products("0.3", "-2.0"), "fused"),
}


def outcome(proto: onnx.ModelProto, folder: Path) -> Site:
    onnx.save(proto, folder / "in.onnx")
    (site,) = pipeline.run(Options(source=folder / "in.onnx", output=folder / "o.onnx"), Talk(quiet=True)).sites
    return site


@pytest.mark.parametrize("name", FORMS)
def test_an_odd_setting_is_fused_and_proven_or_refused(name: str, tmp_path: Path) -> None:
    proto, expected = FORMS[name]
    site = outcome(proto, tmp_path)
    assert (site.status if site.reason is None else site.reason.code) == expected, site.reason


def test_a_setting_that_is_read_wrongly_would_be_seen(tmp_path: Path) -> None:
    read = contrib_multihead.band_behind
    with (
        mock.patch.object(contrib_multihead, "band_behind", lambda anchor, causal, *rest: read(anchor, True, *rest)),
        pytest.raises(NumbersDiffer),
    ):
        outcome(FORMS["unidirectional_2"][0], tmp_path)


def test_without_the_steps_of_a_finite_fill_the_rounding_of_a_right_attention_fails(tmp_path: Path) -> None:
    """In rows whose keys are all padding a score of about -10000 keeps three digits behind the point."""
    unknown = accept.Noise(accept.UNKNOWN_NOISE, accept.UNKNOWN_NOISE)
    with mock.patch.object(check_site, "_unknown_noise", return_value=unknown), pytest.raises(NumbersDiffer):
        outcome(FORMS["causal_mask_and_bias"][0], tmp_path)
