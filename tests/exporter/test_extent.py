# SPDX-License-Identifier: Apache-2.0
"""No run for a proof takes memory out of proportion: what a model's tensors measure at given sizes is asked first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.torch_exports import run

from flash_export import export_lengths, trials
from flash_export.draw import Drawn, draw_inputs
from flash_export.extent import Extent

ATTENTION = ir.from_proto(graphs.model(graphs.PLAIN))
HEAD = '<ir_version: 9, opset_import: ["": 18]>\n'


def test_scores_are_as_large_as_queries_times_keys() -> None:
    extent = Extent(ATTENTION)
    assert extent.elements("scores", {"B": 2, "S": 100, "T": 30}) == 2 * 4 * 100 * 30
    assert extent.largest({"B": 2, "S": 100, "T": 30}) == 2 * 4 * 100 * 30
    assert extent.largest({"B": 1, "S": 1, "T": 30}) == 4 * 8 * 30  # the keys themselves


def test_what_is_not_known_counts_as_nothing() -> None:
    extent = Extent(ATTENTION)
    assert extent.elements("scores", {"B": 2}) == 0
    assert extent.elements("nobody", {"B": 2, "S": 1, "T": 1}) == 0
    assert extent.largest({}) == 0


def test_two_names_of_one_length_are_one() -> None:
    text = "g (float[a, 3] x, float[b, 3] y) => (float[c, 3] z) { s = Add (x, y)  z = Mul (s, s) }"
    extent = Extent(ir.from_onnx_text(HEAD + text))
    assert extent.elements("s", {"a": 5, "b": 5}) == 15


def test_what_comes_from_weights_alone_is_left_out() -> None:
    """GPT-2's head is the transpose of its table of embeddings, larger than any run of it."""
    text = """g (float[batch, 2] x) => (float[batch, 1000] y) <float[1000, 2] table> {
        w = Transpose <perm = [1, 0]> (table)
        y = MatMul (x, w)
    }"""
    assert Extent(ir.from_onnx_text(HEAD + text)).largest({"batch": 1}) == 1000


_OPERATOR = "y = com.microsoft.GroupQueryAttention <num_heads = {heads}, kv_num_heads = 1> (x, x, x)"
_BRANCH = """b = Size (x)  t = Cast <to = 9> (b)
    y = If (t) <then_branch = g () => (p) { p = Softmax (x) }, else_branch = h () => (q) { q = Identity (x) }>"""
_FUNCTION = '<domain: "own", opset_import: ["": 18]> Attend (a) => (c) { c = Softmax (a) }'


@pytest.mark.parametrize(
    ("body", "heads", "functions"),
    [
        (_OPERATOR.format(heads=5), 5, ""),
        ("y = Attention (x, x, x)", 16, ""),
        (_BRANCH, 16, ""),
        ("y = own.Attend (x)", 16, _FUNCTION),
        ("y = Softmax (x)", 0, ""),
        ("w = Constant <value_floats = [1.0]> ()  p = Softmax (w)  y = Mul (x, p)", 0, ""),
        ("z = NonZero (x)  f = Cast <to = 1> (z)  p = Softmax (f)  y = Reshape (p, target)", 16, ""),
        ("r = Reshape (x, target)  p = Softmax (r)  y = Reshape (p, target)", 16, ""),
    ],
)
def test_scores_inside_operators_branches_and_functions_count(body: str, heads: int, functions: str) -> None:
    domains = '"": 23, "com.microsoft": 1, "own": 1'
    given = "float[batch, seq, 20] x, int64[m] target"
    text = f"g ({given}) => (float[batch, seq, 20] y) {{ {body} }} {functions}"
    extent = Extent(ir.from_onnx_text(f"<ir_version: 9, opset_import: [{domains}]>\n" + text))
    assert extent.largest({"batch": 2, "seq": 1000}) == max(2 * 1000 * 20, 2 * heads * 1000**2)


def vocabulary(width: int) -> ir.Model:
    text = f"g (float[batch, seq, 2] x) => (float[batch, seq, {width}] y) <float[2, {width}] w> {{ y = MatMul (x, w) }}"
    return ir.from_onnx_text(HEAD + text)


def planned(model: ir.Model) -> list[dict[str, int] | None]:
    plan = trials.plan_trials(model, example={}, ranges={}, values=None, seed=0)
    return [choices[0].sizes for choices in plan.trials]


def test_of_a_wide_vocabulary_one_setting_keeps_its_batch_and_the_others_their_length() -> None:
    assert planned(vocabulary(1000)) == [{"batch": b, "seq": s} for b, s in ((3, 67), (1, 1), (2, 131))]
    wide = planned(vocabulary(250_000))
    assert wide == [{"batch": 3, "seq": 9}, {"batch": 1, "seq": 1}, {"batch": 1, "seq": 131}]
    assert all(sizes and sizes["batch"] * sizes["seq"] * 250_000 <= trials.MOST_ELEMENTS for sizes in wide)


def test_a_model_that_is_too_large_at_every_size_is_tried_at_the_smallest() -> None:
    assert planned(vocabulary(trials.MOST_ELEMENTS + 1))[0] == {"batch": 1, "seq": 3}


def test_a_large_model_without_a_choice_of_sizes_is_run_once() -> None:
    text = "g (float[{n}] x) => (float[{n}] y) {{ y = Neg (x) }}"
    assert len(planned(ir.from_onnx_text(HEAD + text.format(n=7)))) == trials.STATIC_TRIALS
    assert len(planned(ir.from_onnx_text(HEAD + text.format(n=trials.MOST_ELEMENTS + 1)))) == 1


def test_a_large_model_is_run_once_at_each_size() -> None:
    text = f"g (float[batch, {trials.MOST_ELEMENTS}] x) => (float[batch, {trials.MOST_ELEMENTS}] y) {{ y = Neg (x) }}"
    assert planned(ir.from_onnx_text(HEAD + text)) == [{"batch": 1}]
    assert planned(ir.from_onnx_text(HEAD + text.replace(str(trials.MOST_ELEMENTS), "7"))) == [
        {"batch": 3}, {"batch": 1}, {"batch": 2},
    ]  # fmt: skip


def test_inputs_are_drawn_when_they_are_asked_for_and_are_the_same_every_time() -> None:
    sizes = {"B": 2, "S": 3, "T": 5}
    lazy, once = Drawn(ATTENTION, sizes, 4), draw_inputs(ATTENTION, sizes, 4)
    assert list(lazy) == list(once) == ["q", "k", "v"]
    assert len(lazy) == 3
    for name, array in once.items():
        np.testing.assert_array_equal(lazy[name], array)
        assert lazy[name] is not lazy[name]


TABLE = "g (float[batch, seq] x) => (float[batch, seq, seq] y)"
TABLE += " { a = Unsqueeze (x, one) b = Unsqueeze (x, two) y = Mul (a, b) }"


@pytest.mark.parametrize(("most", "batch"), [(10_000, 3), (1000, 1), (100, None)])
def test_the_end_of_a_range_is_tried_with_as_little_memory_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, batch: int | None
) -> None:
    """Scores of 20 x 20 in batches of three are 1,200 numbers."""
    monkeypatch.setattr(export_lengths, "MOST_ELEMENTS", most)
    text = TABLE.replace(" {", " <int64[1] one = {1}, int64[1] two = {2}> {", 1)
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    asked = []

    def eager(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        asked.append(feeds["x"].shape)
        return run(path.read_bytes(), [feeds["x"]])

    dims = {"batch": (1, 64), "seq": (1, 19)}
    notes = export_lengths.take_back(path, eager, {"x": np.ones((3, 7), np.float32)}, dims, {"seq": [20]})
    assert asked == ([] if batch is None else [(batch, 20)])
    assert dims["seq"] == (1, 19 if batch is None else 20)
    assert ["a tensor of it has 400 elements" in note for note in notes] == ([True] if batch is None else [])
