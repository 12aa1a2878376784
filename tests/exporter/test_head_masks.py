# SPDX-License-Identifier: Apache-2.0
"""Masks and biases that differ from head to head at some lengths alone stay tensors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exporter import graphs
from exporter.graphs import both, fuse, holding, numbers, only

WINDOWS = np.array([200, 300, 400, 500], np.int64).reshape(4, 1, 1)
SLOPES = np.array([0.0, 0.1, 0.2, 0.3], np.float32).reshape(4, 1, 1)
NEAR = "far = Sub (i, j)\n near = Less (far, windows)\n past = LessOrEqual (j, i)\n"
FORMS = {
    "a window of each head": NEAR + "keep = Identity (near)\n masked = Where (keep, scaled, hidden)",
    "a causal window of each head": NEAR + "keep = And (near, past)\n masked = Where (keep, scaled, hidden)",
    "an added window of each head": NEAR + "bias = Where (near, zero, hidden)\n masked = Add (scaled, bias)",
    "a finite bias of each head": NEAR + "bias = Where (near, zero, slopes)\n masked = Add (scaled, bias)",
    "ALiBi over positions, alike where there is one": (
        "x = Cast <to = 1> (j)\n bias = Mul (slopes, x)\n masked = Add (scaled, bias)"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_heads_that_differ_beyond_some_length_are_not_taken_for_alike(form: str) -> None:
    body = graphs.LENGTHS + graphs.PRODUCT + FORMS[form] + "\n" + graphs.REST
    proto = graphs.model(
        body,
        inputs=f"{graphs.QKV}, int64[4, 1, 1] windows, float[4, 1, 1] slopes",
    )
    _require_alike(holding(proto, windows=WINDOWS, slopes=SLOPES))


@pytest.mark.parametrize("dtype", [np.bool_, np.float32])
def test_a_table_whose_heads_differ_in_far_rows_alone_is_not_taken_for_one(dtype: type) -> None:
    distance = np.subtract.outer(np.arange(640), np.arange(640))
    keep = (distance >= 0) & (distance < WINDOWS)
    table, use = (keep, "masked = Where (part, scaled, hidden)")
    if dtype is np.float32:
        table, use = np.where(keep, 0, -np.inf), "masked = Add (scaled, part)"
    lines = "end = Concat <axis = 0> (rows1, columns1)\n part = Slice (table, none, end, ax23)\n" + use
    body = (
        graphs.LENGTHS
        + graphs.PRODUCT
        + "rows1 = Unsqueeze (rows, ax0)\n columns1 = Unsqueeze (columns, ax0)\n"
        + f"{lines}\n{graphs.REST}"
    )
    proto = graphs.model(
        body,
        inputs=f"{graphs.QKV}, {'bool' if dtype is np.bool_ else 'float'}[1, 4, 640, 640] table",
        constants=graphs.CONSTANTS + ", int64[2] none = {0, 0}, int64[2] ax23 = {2, 3}",
    )
    _require_alike(holding(proto, table=table[None].astype(dtype)))


def _require_alike(proto: onnx.ModelProto) -> None:
    fused, sites = fuse(proto)
    site = only(sites)
    assert site.status == "fused", site.reason
    assert site.bias_shape is not None
    assert site.bias_shape[1] == 4
    for sizes in ({"B": 1, "S": 9, "T": 9}, {"B": 1, "S": 520, "T": 520}, {"B": 2, "S": 450, "T": 611}):
        expected, got = both(proto, fused, numbers(sizes))
        seen = np.isfinite(expected)
        np.testing.assert_allclose(got[seen], expected[seen], atol=3e-6, rtol=0)
