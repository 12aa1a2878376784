# SPDX-License-Identifier: Apache-2.0
"""The check runs a model past its windows too: on shorter inputs a wrong one, or none, is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from exporter import graphs

from flash_export import pipeline
from flash_export.errors import NumbersDiffer
from flash_export.longer import Longer, longer_setting
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.rewrite import rewrite
from flash_export.sites import Site
from flash_export.talk import Talk

WINDOW = 300
_BY_POSITIONS = "far = Sub (i, j)\n near = Less (far, w)\n past = LessOrEqual (j, i)\n keep = And (near, past)\n"
_TABLE = np.tri(640, dtype=bool) & ~np.tri(640, k=-WINDOW, dtype=bool)


def _model(*, table: bool) -> onnx.ModelProto:
    lines = "end = Reshape (columns, ax1)\n end2 = Concat <axis = 0> (end, end)\n"
    lines += "part = Slice (table, none, end2, both)\n keep = Cast <to = 9> (part)\n"
    body = graphs.LENGTHS + graphs.PRODUCT + (lines if table else _BY_POSITIONS)
    proto = graphs.model(
        body + "masked = Where (keep, scaled, hidden)\n" + graphs.REST,
        inputs=graphs.QKV.replace("T", "S") + (", bool[640, 640] table" if table else ""),
        constants=f"{graphs.CONSTANTS}, int64 w = {{{WINDOW}}}, int64[2] none = {{0, 0}}, int64[2] both = {{0, 1}}",
    )
    return graphs.holding(proto, table=_TABLE) if table else proto


def _lost(node: ir.Node) -> None:
    node.attributes["window_left"] = ir.AttrInt64("window_left", -1)


def _one_more(node: ir.Node) -> None:
    node.attributes["window_left"] = ir.AttrInt64("window_left", WINDOW)


@pytest.mark.parametrize("table", [False, True], ids=["by positions", "in a table"])
@pytest.mark.parametrize("fault", [_lost, _one_more])
def test_a_window_that_is_wrong_past_all_drawn_lengths_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[ir.Node], None], *, table: bool
) -> None:
    def wrong(model: ir.Model, sites: list[Site], *, fallback: bool) -> int:
        count = rewrite(model, sites, fallback=fallback)
        (node,) = (n for n in model.graph if n.domain == DOMAIN)
        assert node.attributes["window_left"].as_int() == WINDOW - 1
        fault(node)
        return count

    onnx.save(_model(table=table), tmp_path / "in.onnx")
    options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx")
    assert pipeline.run(options, Talk(quiet=True))
    monkeypatch.setattr(pipeline, "rewrite", wrong)
    with pytest.raises(NumbersDiffer):
        pipeline.run(options, Talk(quiet=True))


def test_a_window_past_which_nothing_is_tried_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = _model(table=False)
    (window,) = (tensor for tensor in proto.graph.initializer if tensor.name == "w")
    window.CopyFrom(onnx.numpy_helper.from_array(np.array(3000), "w"))
    onnx.save(proto, tmp_path / "in.onnx")
    assert pipeline.run(Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx"), Talk(quiet=True))
    warnings = json.loads((tmp_path / "report.json").read_text())["check"]["warnings"]
    assert [text for text in warnings if "no input longer than 3000" in text and "--values" in text]


_MOST = 2**25


def _longer(
    body: str, *inputs: str, taken: dict[str, int], ends: dict[str, int] | None = None, own: int | None = None
) -> Longer | None:
    """Of a model of ``inputs`` [batch, 3, length, 20] whose output is ``y``."""
    values = ", ".join(f"float[batch, 3, {name}, 20] {name}_in" for name in inputs)
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    main ({values}) => (int64[M, N] y) <int64 n = {{{WINDOW}}}, int64 zero = {{0}}, int64 one = {{1}}> {{ {body} }}"""
    ranges = {name: (1, end) for name, end in (ends or {}).items()}
    model = ir.from_proto(onnx.parser.parse_model(text))
    return longer_setting(model, [{"batch": 2} | taken], [ranges], [own] if own else [], most=_MOST)


_NO_NUMBER, _A_NUMBER = "y = Shape (a_in)", "s = Shape (a_in)\n y = Sub (s, n)"


def test_a_window_of_the_fused_model_asks_for_the_length_at_which_it_hides_a_key() -> None:
    """Row 301 is the first from which a window of 300 hides a key: that of a length of 302."""
    assert _longer(_NO_NUMBER, "a", taken={"a": 131}, ends={"a": WINDOW + 1}, own=WINDOW) is None
    found = _longer(_NO_NUMBER, "a", taken={"a": 131}, ends={"a": WINDOW + 2}, own=WINDOW)
    assert found is not None
    assert found.choices == ({"batch": 1, "a": WINDOW + 2},)
    assert _longer(_NO_NUMBER, "a", taken={"a": WINDOW + 2}, own=WINDOW) is None
    assert _longer(_NO_NUMBER, "a", taken={"a": WINDOW + 1}, own=WINDOW)


def test_several_lengths_are_tried_apart_and_then_alike() -> None:
    found = _longer(_A_NUMBER, "a", "b", taken={"a": 131, "b": 97})
    assert found is not None
    lengths = [(choice["a"], choice["b"]) for choice in found.choices]
    assert lengths == [(312, 314), (312, 312), (302, 304), (302, 302), (311, 313), (311, 311), (301, 303), (301, 301)]
    assert (found.names, found.too_large) == ((f'{WINDOW} at node "y"',), ())


def test_the_shortest_of_the_lengths_that_can_grow_counts() -> None:
    assert _longer(_A_NUMBER, "a", "b", taken={"a": 400, "b": WINDOW + 1})
    assert _longer(_A_NUMBER, "a", "b", taken={"a": 400, "b": WINDOW + 2}) is None
    assert _longer(_A_NUMBER, "a", "b", taken={"a": 400, "b": 9}, ends={"b": 9}) is None
    assert _longer(_A_NUMBER, "a", "b", taken={"a": 400, "b": 9}, ends={"a": 400, "b": 9}) is None


def test_a_length_at_which_a_tensor_is_too_large_is_told() -> None:
    scores = "t = Transpose <perm = [0, 1, 3, 2]> (a_in)\n m = MatMul (a_in, t)\n s = Shape (m)\n y = Sub (s, n)"
    text = scores.replace("(s, n)", "(s, large)").replace("t = T", "large = Constant <value_int = 4000> ()\n t = T")
    found = _longer(text, "a", taken={"a": 131})
    assert found == Longer((), (), ('4000 at node "y"',))
    assert _longer(text, "a", taken={"a": 131}, ends={"a": 4000}) is None
