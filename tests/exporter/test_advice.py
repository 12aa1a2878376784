# SPDX-License-Identifier: Apache-2.0
"""Advice on masks does not send a user in a circle: whoever is told to hide by -inf is told of rows of padding too."""

from __future__ import annotations

from exporter.graphs import LENGTHS, PRODUCT, attention, fuse, model, only

from flash_export.advice import GUARD
from flash_export.options import Options
from flash_export.pipeline import judge
from flash_export.talk import Talk

VISIBLE = "visible = LessOrEqual (j, i)\n masked = Where (visible, scaled, {fill})"
"""Causal, by a number that replaces the scores."""


def test_the_refusal_of_a_finite_fill_names_the_guard() -> None:
    constants = "float scale = {0.5}, float some = {-100.0}, int64[1] ax0 = {0}, int64[1] ax1 = {1}, int64 i0 = {0}, "
    proto = attention(VISIBLE.format(fill="some"), constants=constants + "int64 i1 = {1}, int64 i2 = {2}")
    reason = only(fuse(proto)[1]).reason
    assert reason is not None
    assert reason.code == "mask_replaces_scores"
    assert "-inf" in reason.action
    assert GUARD in reason.action


def test_the_warning_of_a_mask_of_queries_by_keys_names_the_guard() -> None:
    inputs = "float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v, bool[B, 1, S, T] visible"
    sites = fuse(attention("masked = Where (visible, scaled, lowest)", inputs=inputs))[1]
    talk = Talk(silent=True)
    judge(sites, Options(source=None), talk)  # type: ignore[arg-type]
    (told,) = talk.warnings
    assert "-inf" in told
    assert GUARD in told


def test_the_guard_is_one_that_is_fused() -> None:
    """What the advice spells, as PyTorch exports it."""
    inputs = "float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v, bool[B, 1, 1, T] visible"
    guarded = (
        "masked = Where (visible, scaled, hidden)\n p = Softmax <axis = -1> (masked)\n odd = IsNaN (p)\n"
        "probs = Where (odd, zero, p)\n out = MatMul (probs, v)\n"
    )
    assert only(fuse(model(LENGTHS + PRODUCT + guarded, inputs=inputs))[1]).status == "fused"
