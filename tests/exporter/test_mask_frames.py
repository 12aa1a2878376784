# SPDX-License-Identifier: Apache-2.0
"""A mask that counts its queries from more than one place, or asks for a length beside a position, stays a tensor."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exporter import graphs
from exporter.graphs import LENGTHS, PRODUCT, QKV, REST, both, fuse, model, numbers, only

CONSTANTS = graphs.CONSTANTS + "".join(f", int64 n{n} = {{{n}}}" for n in (8, 50, 97, 100, 150, 200, 300, 350))
FIRST = "ok = LessOrEqual (j, i)\n"
LAST = "ts = Sub (columns, rows)\n ib = Add (i, ts)\n ok = LessOrEqual (j, ib)\n"
UNLESS = "no = Not (x)\n keep = And (ok, no)\n"
SAME = QKV.replace("T", "S")

# A mask, the inputs, and sizes at which it is no band. None of them is tried when it is read.
MASKS = {
    "a window where there are more keys": (
        FIRST + "d = Sub (i, j)\n near = Less (d, n8)\n many = GreaterOrEqual (rows, columns)\n o = Or (near, many)\n"
        " keep = And (ok, o)\n",
        QKV,
        (20, 30),
    ),
    "one key behind the first n": (
        LAST + "e = Add (rows, n97)\n one = Equal (j, e)\n keep = Or (ok, one)\n",
        QKV,
        (33, 131),
    ),
    "late queries, keys far from the last": (
        LAST
        + "late = GreaterOrEqual (i, n300)\n e = Sub (ts, n100)\n far = Less (j, e)\n x = And (late, far)\n"
        + UNLESS,
        QKV,
        (513, 700),
    ),
    "late keys, queries past the keys": (
        FIRST + "late = GreaterOrEqual (j, n300)\n e = Add (columns, n100)\n past = GreaterOrEqual (i, e)\n"
        " x = And (late, past)\n" + UNLESS,
        QKV,
        (625, 400),
    ),
    "the last query where it is one": (
        FIRST
        + "end = Sub (rows, i1)\n a = Equal (i, end)\n b = Equal (i, n350)\n c = And (a, b)\n early = Less (j, n50)\n"
        " x = And (c, early)\n" + UNLESS,
        SAME,
        (351, 351),
    ),
    "the last query where it is one of many": (
        FIRST + "end = Sub (rows, i1)\n a = Equal (i, end)\n u = Sub (i, n150)\n b = GreaterOrEqual (u, n200)\n"
        " w = Sub (i, n300)\n e = LessOrEqual (w, n100)\n c = And (a, b)\n y = And (c, e)\n early = Less (j, n50)\n"
        " x = And (y, early)\n" + UNLESS,
        SAME,
        (380, 380),
    ),
    "both ways at once": (
        LAST + "a = GreaterOrEqual (i, n100)\n b = Less (i, n150)\n c = And (a, b)\n d = GreaterOrEqual (j, n200)\n"
        " e = Less (j, n300)\n f = And (d, e)\n g = Equal (j, ib)\n h = And (c, f)\n x = And (g, h)\n" + UNLESS,
        QKV,
        (160, 280),
    ),
    "a square that float32 rounds": (
        FIRST + "fi = Cast <to = 1> (i)\n fj = Cast <to = 1> (j)\n ii = Mul (fi, fi)\n s = Add (ii, fj)\n"
        " g = Greater (s, ii)\n first = Equal (j, i0)\n o = Or (g, first)\n keep = And (ok, o)\n",
        SAME,
        (5, 5),
    ),
}


def proto(mask: str, inputs: str) -> onnx.ModelProto:
    body = LENGTHS + PRODUCT + mask + "masked = Where (keep, scaled, hidden)\n" + REST
    return model(body, inputs=inputs, constants=CONSTANTS)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_another_form_where_nobody_looks_stays_a_tensor(name: str) -> None:
    mask, inputs, (rows, columns) = MASKS[name]
    graph = proto(mask, inputs)
    fused, sites = fuse(graph)
    assert only(sites).status == "fused", only(sites).reason
    assert only(sites).bias_shape is not None
    arrays = numbers({"B": 1, "S": rows, "T": columns})
    right, got = both(graph, fused, arrays)
    np.testing.assert_allclose(got, right, atol=4e-6, rtol=1e-5)


BANDS = {
    "of no more keys than there are": (FIRST + "in_keys = Less (j, columns)\n keep = And (ok, in_keys)\n", "top_left"),
    "of no more queries than there are": (
        LAST + "in_rows = Less (i, rows)\n keep = And (ok, in_rows)\n",
        "bottom_right",
    ),
    "not below the first": (LAST + "a = GreaterOrEqual (i, i0)\n keep = And (ok, a)\n", "bottom_right"),
    "counted backwards": (
        "m1 = Neg (i1)\n r = Range (rows, i0, m1)\n c = Range (columns, i0, m1)\n ru = Unsqueeze (r, ax1)\n"
        " cu = Unsqueeze (c, ax0)\n keep = GreaterOrEqual (cu, ru)\n",
        "bottom_right",
    ),
    "a triangle of ones": (
        "r1 = Unsqueeze (rows, ax0)\n c1 = Unsqueeze (columns, ax0)\n rc = Concat <axis = 0> (r1, c1)\n"
        " ones = ConstantOfShape <value = int64[1] {1}> (rc)\n low = Trilu <upper = 0> (ones)\n"
        " keep = Cast <to = 9> (low)\n",
        "top_left",
    ),
}


@pytest.mark.parametrize("name", BANDS)
def test_conditions_that_no_position_meets_change_nothing(name: str) -> None:
    mask, kind = BANDS[name]
    site = only(fuse(proto(mask, QKV))[1])
    assert site.status == "fused", site.reason
    assert site.attributes is not None
    assert (site.attributes.causal_kind, site.bias_shape) == (kind, None)


@pytest.mark.parametrize("length", ["past_len", "other"])
def test_a_third_length_beside_a_position_keeps_the_mask(length: str) -> None:
    """Keys are a cache of P and S new ones; ``other`` is a length of an input that has nothing else to do with them."""
    inputs = (
        "float[B, 4, S, 8] q, float[B, 4, P, 8] pk, float[B, 4, P, 8] pv, float[B, 4, S, 8] nk, float[B, 4, S, 8] nv, "
        "float[N] image"
    )
    body = (
        "k = Concat <axis = 2> (pk, nk)\n v = Concat <axis = 2> (pv, nv)\n p_shape = Shape (pk)\n"
        " n_shape = Shape (image)\n past_len = Gather <axis = 0> (p_shape, i2)\n"
        " other = Gather <axis = 0> (n_shape, i0)\n"
        f"{LENGTHS}{PRODUCT} ib = Add (i, past_len)\n ok = LessOrEqual (j, ib)\n u = Sub (i, n150)\n"
        f" late = GreaterOrEqual (u, n150)\n e = Sub ({length}, n50)\n w = Sub (e, n50)\n far = Less (j, w)\n"
        f" x = And (late, far)\n {UNLESS} masked = Where (keep, scaled, hidden)\n{REST}"
    )
    graph = model(body, inputs=inputs, constants=CONSTANTS)
    fused, sites = fuse(graph)
    assert only(sites).status == "fused", only(sites).reason
    assert only(sites).bias_shape is not None
    q, nk, nv = numbers({"B": 1, "S": 320, "T": 320})
    _, pk, pv = numbers({"B": 1, "S": 1, "T": 200}, seed=1)
    right, got = both(graph, fused, [q, pk, pv, nk, nv, np.zeros(200, np.float32)])
    np.testing.assert_allclose(got, right, atol=4e-6, rtol=1e-5)
