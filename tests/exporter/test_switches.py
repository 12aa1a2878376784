# SPDX-License-Identifier: Apache-2.0
"""A mask that has another form at some lengths is never taken for the form that it has at the others."""

from __future__ import annotations

import numpy as np
import pytest
from exporter import graphs
from exporter.graphs import attention, both, fuse, numbers, only

CAUSAL = "past = LessOrEqual (j, i)\n open = {lines}\n keep = Or (past, open)\n masked = Where (keep, scaled, hidden)"

# A condition on the lengths S ("rows"), T ("columns") and B, and sizes at which it holds.
CONDITIONS = {
    "a bucket of lengths": ("d = Div (rows, n)", "Equal (d, m)", {"n": 64, "m": 5}, (1, 330, 330)),
    "a bucket of another length": ("d = Div (columns, n)", "Equal (d, m)", {"n": 64, "m": 13}, (1, 3, 840)),
    "a length between two": (
        "a = Less (rows, m)\n b = Greater (rows, n)",
        "And (a, b)",
        {"n": 349, "m": 351},
        (1, 350, 350),
    ),
    "three times a length between two": (
        "t = Mul (rows, w)\n a = Less (t, m)\n b = Greater (t, n)",
        "And (a, b)",
        {"w": 3, "n": 1000, "m": 1100},
        (1, 350, 350),
    ),
    "one difference": ("d = Sub (columns, rows)", "Equal (d, n)", {"n": 13}, (1, 5, 18)),
    "twice as long": ("d = Mul (rows, n)", "Equal (d, columns)", {"n": 2}, (1, 10, 20)),
    "one sum": ("d = Add (columns, rows)", "Equal (d, n)", {"n": 110}, (1, 50, 60)),
    "one product": ("d = Mul (columns, rows)", "Equal (d, n)", {"n": 611}, (1, 13, 47)),
    "a number of tokens": (
        "batch = Gather <axis = 0> (q_shape, i0)\n d = Mul (batch, rows)",
        "Equal (d, n)",
        {"n": 110},
        (2, 55, 55),
    ),
    "a batch and a length": (
        "batch = Gather <axis = 0> (q_shape, i0)\n a = Equal (batch, n)\n b = Equal (rows, m)",
        "And (a, b)",
        {"n": 7, "m": 13},
        (7, 13, 13),
    ),
    "one length, beside a longer one": (
        "a = Equal (rows, n)\n b = Less (rows, columns)",
        "And (a, b)",
        {"n": 330},
        (1, 330, 400),
    ),
    "one length, at keys far behind": (
        "a = Equal (rows, n)\n b = Greater (j, m)",
        "And (a, b)",
        {"n": 330, "m": 700},
        (1, 330, 710),
    ),
    "two remainders": (
        "a = Mod (rows, n)\n b = Mod (rows, m)\n c = Equal (a, w)\n d = Equal (b, i1)",
        "And (c, d)",
        {"n": 97, "m": 7, "w": 13},
        (1, 498, 498),
    ),
    "a number that a condition has moved": (
        "c = Greater (rows, n)\n f = Cast <to = 7> (c)\n g = Mul (f, m)\n d = Add (rows, g)",
        "Equal (d, w)",
        {"n": 20, "m": 10, "w": 60},
        (1, 50, 50),
    ),
    "a fraction of a length made whole": (
        "f = Cast <to = 1> (rows)\n g = Mul (f, part)\n d = Cast <to = 7> (g)",
        "Equal (d, n)",
        {"n": 3, "part": 0.01},
        (1, 330, 330),
    ),
    "a fraction of a length made a truth": (
        "f = Cast <to = 1> (rows)\n g = Mul (f, part)\n d = Cast <to = 7> (g)\n e = Sub (d, n)\n x = Cast <to = 9> (e)",
        "Not (x)",
        {"n": 3, "part": 0.01},
        (1, 330, 330),
    ),
    "a table of lengths": (
        "short = ConstantOfShape <value = bool[1] {0}> (n)\n open1 = ConstantOfShape <value = bool[1] {1}> (m)\n"
        "table = Concat <axis = 0> (short, open1, short)",
        "Gather <axis = 0> (table, rows)",
        {"n": [300], "m": [50]},
        (1, 330, 330),
    ),
    "one place of a table": (
        "short = ConstantOfShape <value = bool[1] {0}> (n)\n open1 = ConstantOfShape <value = bool[1] {1}> (m)\n"
        "table = Concat <axis = 0> (short, open1, short)\n at = Unsqueeze (rows, ax0)\n to = Add (at, ax1)",
        "Slice (table, at, to)",
        {"n": [300], "m": [50]},
        (1, 330, 330),
    ),
    "a key that runs away from the length": (
        "t = Mul (rows, i2)\n d = Sub (t, j)",
        "Equal (d, n)",
        {"n": 30},
        (1, 20, 20),
    ),
}


def _declared(name: str, value: float | list[int]) -> str:
    if isinstance(value, list):
        return f"int64[{len(value)}] {name} = {{{', '.join(map(str, value))}}}"
    return f"{'float' if isinstance(value, float) else 'int64'} {name} = {{{value}}}"


@pytest.mark.parametrize("name", CONDITIONS)
def test_where_a_condition_on_lengths_opens_the_mask_it_opens_in_the_fused_model(name: str) -> None:
    lines, condition, constants, (batch, rows, columns) = CONDITIONS[name]
    proto = attention(
        lines + "\n" + CAUSAL.format(lines=condition),
        constants=graphs.CONSTANTS + "".join(f", {_declared(key, value)}" for key, value in constants.items()),
    )
    fused, sites = fuse(proto)
    assert only(sites).status == "fused"
    open_at = numbers({"B": batch, "S": rows, "T": columns})
    closed_at = numbers({"B": batch, "S": rows + 1, "T": columns + 5})
    for inputs in (open_at, closed_at):
        expected, got = both(proto, fused, inputs)
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


ALWAYS = {
    "no length is below 0": "c = Less (rows, i0)\n open = Identity (c)",
    "a shape's unknown is -1": "m1 = Neg (i1)\n c = Equal (rows, m1)\n open = Identity (c)",
    "a length past every other": "a = Add (rows, columns)\n c = Greater (i0, a)\n open = Identity (c)",
}


@pytest.mark.parametrize("name", ALWAYS)
def test_a_condition_that_no_length_meets_changes_nothing(name: str) -> None:
    proto = attention(
        f"{ALWAYS[name]}\n past = LessOrEqual (j, i)\n keep = Or (past, open)\n masked = Where (keep, scaled, hidden)"
    )
    site = only(fuse(proto)[1])
    assert site.status == "fused"
    assert site.attributes is not None
    assert site.attributes.causal_kind == "top_left"
    assert site.bias_shape is None


def test_a_comparison_without_numbers_at_the_sizes_tried_proves_nothing() -> None:
    """Keys from the 1000th on are compared in another way; where a mask is read, there are none."""
    proto = attention(
        "first = Slice (j, i0s, many, last)\n later = Slice (j, many, most, last)\n a = LessOrEqual (first, i)\n"
        " b = Less (later, i)\n keep = Concat <axis = -1> (a, b)\n masked = Where (keep, scaled, hidden)",
        constants=graphs.CONSTANTS
        + ", int64[1] i0s = {0}, int64[1] many = {1000}, int64[1] most = {9999}, int64[1] last = {-1}",
    )
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused"
    assert site.attributes is not None
    assert site.attributes.causal_kind == "none"
    for rows, columns in ((5, 7), (1010, 1010)):
        expected, got = both(proto, fused, numbers({"B": 1, "S": rows, "T": columns}))
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


def test_sides_that_meet_at_no_size_that_is_tried_prove_nothing() -> None:
    """The model runs with 4 queries alone; its site is left or fused, and its command does not end in a traceback."""
    proto = attention(
        "four = ConstantOfShape <value = int64[1] {3}> (n4)\n past = LessOrEqual (j, i)\n"
        " b = Range (i0, rows, i1)\n c = Equal (b, four)\n u = Unsqueeze (c, ax1)\n keep = Or (past, u)\n"
        " masked = Where (keep, scaled, hidden)",
        constants=graphs.CONSTANTS + ", int64[1] n4 = {4}",
    )
    fused, sites = fuse(proto)
    assert only(sites).status == "fused"
    expected, got = both(proto, fused, numbers({"B": 1, "S": 4, "T": 7}))
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)
