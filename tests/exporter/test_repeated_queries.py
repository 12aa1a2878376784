# SPDX-License-Identifier: Apache-2.0
"""A run in which a mask is longer than Q, and repeats its only query, is none that the fused node is held to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import graphs

from flash_export import pipeline
from flash_export.errors import UsageError
from flash_export.options import Options
from flash_export.repeated_queries import Span, spans_below, why_repeated
from flash_export.sites import Site
from flash_export.talk import Talk

ADDED = graphs.PRODUCT + "masked = Add (scaled, m)\n" + graphs.REST
HIDDEN = graphs.PRODUCT + "masked = Where (m, scaled, lowest)\n" + graphs.REST
UNDECLARED = "float[B, 4, N, 8] out"
"""An output whose query length has a name that no input has: only what lies inside tells a broadcast."""


def fused(folder: Path, body: str, mask: str, **values: np.ndarray) -> Site:
    """The only site of the model with the input ``mask``, fused and checked."""
    proto = graphs.model(body, inputs=f"{graphs.QKV}, {mask} m", outputs=UNDECLARED)
    onnx.save(proto, folder / "in.onnx")
    if values:
        np.savez(folder / "values.npz", **values)
    options = Options(
        source=folder / "in.onnx", output=folder / "out.onnx", values=folder / "values.npz" if values else None
    )
    return graphs.only(pipeline.run(options, Talk(silent=True)).sites)


def sized(queries: int, mask: np.ndarray) -> dict[str, np.ndarray]:
    q, k, v = graphs.numbers({"B": 2, "S": queries, "T": 7})
    return {"q": q, "k": k, "v": v, "m": mask}


TABLES = {
    "added": (ADDED, "float", np.zeros((2, 1, 2, 7), np.float32)),
    "hidden": (HIDDEN, "bool", np.ones((2, 1, 2, 7), bool)),
}


@pytest.mark.parametrize(("body", "kind", "mask"), TABLES.values(), ids=TABLES)
def test_a_mask_of_two_queries_is_proven_where_there_are_two(
    body: str, kind: str, mask: np.ndarray, tmp_path: Path
) -> None:
    site = fused(tmp_path, body, f"{kind}[B, 1, 2, T]", **sized(2, mask))
    assert (site.status, site.bias_shape) == ("fused", ["B", 1, 2, "T"])


@pytest.mark.parametrize("given", [False, True], ids=["drawn", "values"])
@pytest.mark.parametrize(("body", "kind", "mask"), TABLES.values(), ids=TABLES)
def test_where_it_repeats_the_only_query_nothing_is_compared(
    body: str, kind: str, mask: np.ndarray, given: bool, tmp_path: Path
) -> None:
    """No fault of the rewrite, so no number differs: the inputs are none that the model is for."""
    with pytest.raises(UsageError, match="runs on none of the inputs") as error:
        fused(tmp_path, body, f"{kind}[B, 1, 2, T]", **(sized(1, mask) if given else {}))
    assert "--values FILE.npz" in str(error.value)
    if given:
        assert "masked has shape [2, 4, 2, 7] where the product of Q and K, scores, is [2, 4, 1, 7]" in str(error.value)


@pytest.mark.parametrize(("body", "kind"), [(ADDED, "float"), (HIDDEN, "bool")], ids=["added", "hidden"])
@pytest.mark.parametrize("queries", ["M", "S", "1"])
def test_a_length_with_a_name_of_its_own_is_drawn_as_long_as_the_queries(
    body: str, kind: str, queries: str, tmp_path: Path
) -> None:
    """As exporters name each input's axes; at one query the mask is tried at another length first."""
    assert fused(tmp_path, body, f"{kind}[B, 1, {queries}, T]").status == "fused"


SINK = (
    graphs.PRODUCT + "shape = Shape (scaled)\n rows = Slice (shape, ax0, ax3)\n full = Concat <axis = 0> (rows, ax1)\n"
    "column = Expand (zero, full)\n wide = Concat <axis = -1> (scaled, column)\n both = Softmax <axis = -1> (wide)\n"
    "probs = Slice (both, ax0, last, ax3)\n out = MatMul (probs, v)\n"
)


def test_the_span_of_a_product_ends_at_its_softmax_and_counts_a_sink_s_column() -> None:
    def spans(body: str, *products: str) -> list[Span]:
        inputs = graphs.QKV + (", float[B, 1, 2, T] m" if "m)" in body else "")
        constants = graphs.CONSTANTS + ", int64[1] last = {-1}"
        return spans_below(ir.from_proto(graphs.model(body, inputs=inputs, constants=constants)), products)

    assert spans(ADDED, "scores") == [Span("scores", "masked", 0)]
    assert spans(SINK, "scores") == [Span("scores", "wide", 1)]
    assert spans(ADDED, "out") == []
    (plain,), (sink,) = spans(ADDED, "scores"), spans(SINK, "scores")
    assert why_repeated([plain], {"scores": (2, 4, 1, 7), "masked": (2, 4, 1, 7)}) == ""
    assert why_repeated([plain], {"scores": (2, 4, 0, 7), "masked": (2, 4, 0, 7)}) == ""
    assert "repeats them" in why_repeated([plain], {"scores": (2, 4, 1, 7), "masked": (2, 4, 2, 7)})
    assert why_repeated([sink], {"scores": (2, 4, 1, 2), "wide": (2, 4, 1, 3)}) == ""
    assert "repeats them" in why_repeated([sink], {"scores": (2, 4, 1, 2), "wide": (2, 4, 2, 3)})
    assert why_repeated([sink], {"scores": (2, 4, 3, 0), "wide": (2, 4, 3, 1)}) == ""
