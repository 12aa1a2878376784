# SPDX-License-Identifier: Apache-2.0
"""Scores times 0 and 1, and a large number added where it is 0, are a mask; any other factor of keys is refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exporter.graphs import CONSTANTS, LENGTHS, PRODUCT, REST, SQUARE, both, code, fuse, holding, model, numbers, only

EXTRA = (
    ", float one = {1.0}, float large = {1e10}, float minus = {-1e10}, float small = {-10000.0}, float half = {0.5}, "
    "int64 far = {9223372036854775807}"
)
SEEN = "seen = GreaterOrEqual (i, j)\n b = Cast <to = 1> (seen)\n"
SLICED = (
    "stop = Unsqueeze (rows, ax0)\n end = Unsqueeze (columns, ax0)\n tall = Slice (table, ax0, stop, ax0)\n"
    " b = Slice (tall, ax0, end, ax1)\n"
)
TIMES = "w = Mul (scaled, b)\n"
REST_OF = "rest = Sub (one, b)\n"

FORMS = {
    "subtracted": TIMES + REST_OF + "c = Mul (large, rest)\n masked = Sub (w, c)\n",
    "added": TIMES + REST_OF + "c = Mul (rest, minus)\n masked = Add (c, w)\n",
    "less_than_one": TIMES + "less = Sub (b, one)\n c = Mul (less, large)\n masked = Add (w, c)\n",
    "turned_round": "w = Mul (b, scaled)\n" + REST_OF + "n = Neg (rest)\n c = Mul (n, large)\n masked = Add (w, c)\n",
}


def proto(mask: str, mark: str = SEEN, **extra: np.ndarray) -> onnx.ModelProto:
    inputs = "float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v"
    inputs += ", float[70, 70] table" if "table" in mark else ""
    graph = model(LENGTHS + PRODUCT + mark + mask + REST, inputs=inputs, constants=CONSTANTS + EXTRA)
    return holding(graph, **extra) if extra else graph


@pytest.mark.parametrize("mark", ["compared", "buffer"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_factor_of_0_and_1_with_a_large_number_is_a_causal_mask(form: str, mark: str) -> None:
    tril = np.tril(np.ones((70, 70), np.float32))
    graph = proto(form) if mark == "compared" else proto(form, SLICED, table=tril)
    fused, sites = fuse(graph)
    assert only(sites).status == "fused", only(sites).reason
    assert (only(sites).attributes or pytest.fail("none")).causal == 1
    for sizes in SQUARE:
        q, k, v = numbers(sizes)
        right, got = both(graph, fused, [q, k, v])
        np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)


def test_a_mask_of_padding_that_is_computed_twice_is_read() -> None:
    again = "again = Cast <to = 1> (valid)\n rest = Sub (one, again)\n c = Mul (rest, minus)\n masked = Add (w, c)\n"
    inputs = "float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v, bool[B, 1, 1, T] valid"
    body = PRODUCT + "b = Cast <to = 1> (valid)\n" + TIMES + again + REST
    graph = model(body, inputs=inputs, constants=CONSTANTS + EXTRA)
    fused, sites = fuse(graph)
    assert only(sites).status == "fused", only(sites).reason
    q, k, v = numbers({"B": 3, "S": 5, "T": 7})
    valid = np.ones((3, 1, 1, 7), bool)
    valid[1, ..., 3:], valid[2, ..., :4] = False, False
    right, got = both(graph, fused, [q, k, v, valid])
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)


HALVES = np.tril(np.ones((70, 70), np.float32))
HALVES[1, 0] = 0.5

REFUSED = {
    "another_number": (proto(FORMS["added"], SLICED, table=HALVES), "scale_not_scalar"),
    "nothing_added": (proto("masked = Mul (scaled, b)\n"), "scale_not_scalar"),
    "added_to_all": (proto(TIMES + "masked = Add (w, minus)\n"), "scale_not_scalar"),
    "added_where_it_is_seen": (proto(TIMES + "c = Mul (b, minus)\n masked = Add (w, c)\n"), "scale_not_scalar"),
    "of_another_mask": (
        proto(TIMES + "s = Greater (i, j)\n o = Cast <to = 1> (s)\n rest = Sub (one, o)\n c = Mul (rest, minus)\n"
              " masked = Add (w, c)\n"),
        "scale_not_scalar",
    ),
    "scaled_between": (
        proto(TIMES + REST_OF + "u = Mul (w, half)\n c = Mul (rest, minus)\n masked = Add (u, c)\n"),
        "scale_not_scalar",
    ),
    "twice": (
        proto("v0 = Mul (scaled, b)\n w = Mul (v0, b)\n" + REST_OF + "c = Mul (rest, minus)\n masked = Add (w, c)\n"),
        "scale_not_scalar",
    ),
    "a_small_number": (
        proto(TIMES + REST_OF + "c = Mul (rest, small)\n masked = Add (w, c)\n"),
        "mask_replaces_scores",
    ),
    "a_large_number": (
        proto(TIMES + REST_OF + "c = Mul (rest, large)\n masked = Add (w, c)\n"),
        "mask_replaces_scores",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("graph", "reason"), REFUSED.values(), ids=REFUSED)
def test_any_other_factor_of_keys_is_refused(graph: onnx.ModelProto, reason: str) -> None:
    assert code(graph) == reason
