# SPDX-License-Identifier: Apache-2.0
"""What a report shows of one attention: its nodes before and after, and the memory it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx.parser
import onnx_ir as ir
import pytest
from exporter import small_models

from flash_export import report_example, report_plots
from flash_export.find import find
from flash_export.rewrite import rewrite

UPCAST = (
    small_models.HEADER
    + """
attention (float16[B, 6, S, 16] q, float16[B, 6, T, 16] k, float16[B, 6, T, 10] v, int64[3] sizes)
  => (float16[B, S, C] out)
<int64[1] one = {1}, float scale = {0.25}>
{
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q, kt)
  wide = Cast <to = 1> (scores)
  scaled = Mul (wide, scale)
  probs = Softmax <axis = -1> (scaled)
  narrow = Cast <to = 10> (probs)
  heads = MatMul (narrow, v)
  turned = Transpose <perm = [0, 2, 1, 3]> (heads)
  minus = Neg (one)
  target = Mul (sizes, minus)
  out = Reshape (turned, target)
}
"""
)


def shown(text: str) -> tuple[dict, ir.Model]:
    model = ir.from_proto(onnx.parser.parse_model(text))
    sites = find(model)
    before = report_example.look_before(model, sites)
    rewrite(model, sites)
    example = report_example.as_json(before, model)
    assert example is not None
    return example, model


def test_the_first_fused_site_is_shown_before_and_after() -> None:
    example, _ = shown(small_models.TWO_ATTENTIONS_ONE_REFUSED)
    assert [node["op"] for node in example["before"]["nodes"]] == ["Transpose", "MatMul", "Mul", "Softmax", "MatMul"]
    assert [node["op"] for node in example["after"]["nodes"]] == ["flash_export.FlashAttention"]
    assert example["before"]["output"] == example["after"]["output"] == "out"
    assert set(example["before"]["inputs"]) == {"q", "k", "v"}


def test_a_model_without_fused_attention_shows_nothing() -> None:
    model = ir.from_proto(onnx.parser.parse_model(small_models.CLASSIFIER))
    before = report_example.look_before(model, find(model))
    assert report_example.as_json(before, model) is None


def test_one_element_constants_are_shown_as_text_that_json_can_hold() -> None:
    graph = onnx.parser.parse_model(
        small_models.HEADER
        + """
g (float[N] x) => (float[N] y) <float low = {-inf}, float[2] pair = {1.0, 2.0}>
{
  half = Constant <value_float = 0.5> ()
  name = Constant <value_string = "text"> ()
  a = Mul (x, half)
  y = Max (a, low)
}
"""
    )
    described = report_example.describe(ir.from_proto(graph))
    assert described["scalars"] == {"low": "-inf", "half": "0.5"}
    json.dumps(described, allow_nan=False)


def test_what_is_constant_or_read_as_a_size_only_is_told_from_what_data_passes() -> None:
    part = ir.from_proto(onnx.parser.parse_model(UPCAST))
    kinds = {node["outputs"][0]: node["sizes"] for node in report_example.describe(part)["nodes"]}
    assert {name for name, sizes in kinds.items() if sizes} == {"minus", "target"}


def test_sizes_that_are_also_added_to_something_are_data() -> None:
    text = UPCAST.replace("=> (", "=> (int64[3] both, ").replace("out = ", "both = Add (target, sizes)\n  out = ")
    part = ir.from_proto(onnx.parser.parse_model(text))
    kinds = {node["outputs"][0]: node["sizes"] for node in report_example.describe(part)["nodes"]}
    assert {name for name, sizes in kinds.items() if sizes} == {"minus"}


def test_memory_counts_scores_and_probabilities_in_the_type_of_the_softmax() -> None:
    example, _ = shown(UPCAST)
    memory = example["memory"]
    length, at = 2048, memory["lengths"].index(2048)
    rows = 6 * length * (16 + 16 + 10 + 10) * 2
    assert memory["fused_bytes"][at] == rows
    assert memory["unfused_bytes"][at] == rows + 2 * 6 * length * length * 4


BIASED = """<ir_version: 9, opset_import: ["" : 18]>
attention (float16[B, 3, S, 16] q, float16[B, 3, T, 16] k, float16[B, 3, T, 16] v, FLOAT[BIAS] bias)
  => (float16[B, 3, S, 16] out)
{
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  products = MatMul (q, kt)
  WIDENED
  scores = Add (wide, bias)
  probs = Softmax <axis = -1> (scores)
  NARROWED
  out = MatMul (narrow, v)
}
"""


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        ("B, 3, S, T", lambda s: 3 * s * s),
        ("B, 1, S, T", lambda s: s * s),
        ("S, T", lambda s: s * s),
        ("1, 3, 1, T", lambda s: 3 * s),
        ("B, 1, S, 1", lambda s: s),
        ("B, 1, 1, T", lambda s: s),
        ("1, 1, 1, 1", lambda s: 1),
    ],
)
@pytest.mark.parametrize(("kind", "width"), [("float16", 2), ("float", 4)])
def test_memory_counts_the_bias_that_the_fused_node_reads(
    shape: str, numbers: Callable[[int], int], kind: str, width: int
) -> None:
    text = BIASED.replace("FLOAT", kind).replace("BIAS", shape)
    to_wide, to_narrow = ("Cast <to = 1>", "Cast <to = 10>") if width == 4 else ("Identity", "Identity")
    text = text.replace("WIDENED", f"wide = {to_wide} (products)").replace("NARROWED", f"narrow = {to_narrow} (probs)")
    memory = shown(text)[0]["memory"]
    for length, fused, unfused in zip(memory["lengths"], memory["fused_bytes"], memory["unfused_bytes"], strict=True):
        rows = 3 * length * 4 * 16 * 2
        assert fused == rows + numbers(length) * width
        assert unfused == rows + 2 * 3 * length * length * width


def test_the_example_of_a_whole_run_is_in_the_report(tmp_path: Path) -> None:
    from exporter.test_cli import run

    source = small_models.write(small_models.ATTENTION, tmp_path / "in.onnx")
    assert run(source, "--no-check") == 0
    example = json.loads((tmp_path / "report.json").read_text())["example"]
    assert example["site"] == "probs"
    assert example["memory"]["unfused_bytes"][0] == pytest.approx(128 * 6 * 32 * 4 + 2 * 3 * 128**2 * 4)


RANGED = """<ir_version: 9, opset_import: ["" : 18]PROPS>
attention (float[B, 3, S, 16] q, float[B, 3, T, 16] k, float[B, 3, T, 16] v) => (float[B, 3, S, 16] out)
{
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q, kt)
  probs = Softmax <axis = -1> (scores)
  out = MatMul (probs, v)
}
"""


def lengths(ranges: str, text: str = RANGED) -> list[int] | None:
    pairs = f', metadata_props: ["flash_export.dims": "{ranges}"]' if ranges else ""
    model = ir.from_proto(onnx.parser.parse_model(text.replace("PROPS", pairs)))
    sites = find(model)
    before = report_example.look_before(model, sites)
    rewrite(model, sites)
    example = report_example.as_json(before, model)
    assert example is not None
    memory = example["memory"]
    if memory is None:
        return None
    assert isinstance(memory, dict)
    assert len(memory["lengths"]) == len(memory["fused_bytes"]) == len(memory["unfused_bytes"])
    report_plots.memory_plot(memory)
    return memory["lengths"]


def limits(queries: str, keys: str) -> str:
    return "{" + f"'S': {queries}, 'T': {keys}".replace("'", '\\"') + "}"


def test_memory_ends_at_the_longest_length_of_the_model() -> None:
    assert lengths("") == list(report_example.LENGTHS)
    assert lengths(limits("[1, null]", "[1, 63]")) == list(report_example.LENGTHS)
    assert lengths(limits("[1, 63]", "[1, 63]")) == [7, 15, 31, 63]
    assert lengths(limits("[1, 9]", "[1, 600]")) == [128, 256, 512, 600]
    assert lengths(limits("[1, 128]", "[1, 128]")) == [16, 32, 64, 128]
    assert lengths(limits("[1, 16384]", "[1, 99999]")) == list(report_example.LENGTHS)
    assert lengths(limits("[1, 3]", "[1, 1]")) == [1, 3]
    assert lengths(limits("[1, 1]", "[1, 1]")) is None
    fixed = RANGED.replace("S,", "40,").replace("T,", "40,")
    assert lengths("", fixed) == [5, 10, 20, 40]
