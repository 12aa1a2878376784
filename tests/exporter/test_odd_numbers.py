# SPDX-License-Identifier: Apache-2.0
"""Constants that leave nothing to attend to are refused by name, before any number is run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from exporter import graphs

from flash_export import pipeline
from flash_export.options import Options
from flash_export.sites import Site
from flash_export.talk import Talk

CONSTANTS = graphs.CONSTANTS + ", float odd = {0.0}, int64[1] last = {-1}, float factor = {1.0}, float cap = {5.0}"
ADDED = graphs.PRODUCT + "masked = Add (scaled, odd)\n" + graphs.REST
TAKEN = graphs.PRODUCT + "masked = Sub (scaled, odd)\n" + graphs.REST
SINK = (
    graphs.PRODUCT + "shape = Shape (scaled)\n rows = Slice (shape, ax0, ax3)\n full = Concat <axis = 0> (rows, ax1)\n"
    "column = Expand (odd, full)\n wide = Concat <axis = -1> (scaled, column)\n both = Softmax <axis = -1> (wide)\n"
    "probs = Slice (both, ax0, last, ax3)\n out = MatMul (probs, v)\n"
)
MULTIPLIED = graphs.PRODUCT + "masked = Mul (scaled, factor)\n" + graphs.REST
CAPPED = graphs.PRODUCT + "bent = Tanh (scaled)\n masked = Mul (bent, factor)\n" + graphs.REST
KEYS = "less = Mul (k, factor)\n" + graphs.PRODUCT.replace("(k)", "(less)") + graphs.REST.replace("masked", "scaled")


def with_number(body: str, name: str, number: float) -> onnx.ModelProto:
    """The model with ``number`` in a constant: of one head for ``odd``, of the others the number is 0.5."""
    proto = graphs.model(body, constants=CONSTANTS)
    (tensor,) = (t for t in proto.graph.initializer if t.name == name)
    array = np.full((1, 4, 1, 1) if name == "odd" else (), 0.5, np.float32)
    array.reshape(-1)[min(1, array.size - 1)] = number
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    return proto


def site_of(body: str, name: str, number: float) -> Site:
    return graphs.only(graphs.fuse(with_number(body, name, number))[1])


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(("body", "what"), [(ADDED, "bias"), (SINK, "sink")], ids=["bias", "sink"])
def test_nan_and_plus_infinity_beside_scores_are_refused(body: str, what: str, number: float) -> None:
    site = site_of(body, "odd", number)
    assert site.reason is not None
    assert site.reason.code == "not_finite"
    assert what in site.reason.text
    assert ("NaN" if np.isnan(number) else "+infinity") in site.reason.text


def test_a_mask_that_adds_plus_infinity_is_refused() -> None:
    chosen = "see = Less (scaled, zero)\n m = Where (see, zero, factor)\n masked = Add (scaled, m)\n"
    site = site_of(graphs.PRODUCT + chosen + graphs.REST, "factor", np.inf)
    assert site.reason is not None
    assert site.reason.code == "not_finite"


def test_what_is_subtracted_counts_with_its_sign() -> None:
    site = site_of(TAKEN, "odd", -np.inf)
    assert site.reason is not None
    assert site.reason.code == "not_finite"
    assert site_of(TAKEN, "odd", np.inf).status == "fused"


@pytest.mark.parametrize("to", [10, 16])
@pytest.mark.parametrize(("number", "what"), [(np.nan, "NaN"), (np.inf, "+infinity"), (3e38, "+infinity")])
def test_a_cast_to_a_type_that_does_not_hold_a_number_makes_it_infinite(number: float, what: str, to: int) -> None:
    body = graphs.PRODUCT + f"less = Cast <to = {to}> (odd)\n same = Cast <to = 1> (less)\n"
    body += "masked = Add (scaled, same)\n" + graphs.REST
    number = number if to == 10 or number != 3e38 else 3.4e38
    site = site_of(body, "odd", number)
    assert site.reason is not None
    assert site.reason.code == "not_finite"
    assert what in site.reason.text
    assert site_of(body, "odd", 100.0).status == "fused"


@pytest.mark.parametrize(("number", "what"), [(np.nan, "NaN"), (np.inf, "+infinity"), (-np.inf, "-infinity")])
@pytest.mark.parametrize("body", [MULTIPLIED, KEYS], ids=["scale", "keys"])
def test_a_scale_that_is_no_number_is_named(body: str, number: float, what: str) -> None:
    site = site_of(body, "factor", number)
    assert site.reason is not None
    assert site.reason.code == "not_finite"
    assert f"multiplied by {what}" in site.reason.text


@pytest.mark.parametrize("number", [-np.inf, 1e30, -3.0])
@pytest.mark.parametrize("body", [ADDED, SINK], ids=["bias", "sink"])
def test_other_numbers_are_fused(body: str, number: float) -> None:
    assert site_of(body, "odd", number).status == "fused"


@pytest.mark.parametrize("body", [MULTIPLIED, CAPPED, KEYS], ids=["scale", "cap", "keys"])
def test_a_factor_of_zero_is_named(body: str) -> None:
    site = site_of(body, "factor", 0.0)
    assert site.reason is not None
    assert site.reason.code == "scale_zero"
    assert site_of(body, "factor", 0.5).status == "fused"


@pytest.mark.parametrize(
    ("body", "name", "number", "why"),
    [
        (MULTIPLIED, "factor", 1e-30, "the scores hardly differ"),
        (SINK, "odd", 1e30, "a sink takes all the weight"),
    ],
)
def test_why_a_scale_does_not_show_is_told(body: str, name: str, number: float, why: str, tmp_path: Path) -> None:
    proto = with_number(body, name, number)
    for tensor in proto.graph.initializer:
        if tensor.name == "odd" and name == "odd":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full((1, 4, 1, 1), number, np.float32), "odd"))
    onnx.save(proto, tmp_path / "in.onnx")
    options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx")
    (site,) = pipeline.run(options, Talk(silent=True)).sites
    assert site.reason is not None
    assert site.reason.code == "not_proven"
    assert why in site.reason.text
