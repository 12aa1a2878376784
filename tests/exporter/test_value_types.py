# SPDX-License-Identifier: Apache-2.0
"""Stated types that an operator contradicts are left out, so that ONNX Runtime loads what is written."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from exporter.torch_exports import run

import flash_export
from flash_export import check, pipeline, runtime
from flash_export.options import Options
from flash_export.talk import Talk
from flash_export.value_types import drop_contradicted, infer

SEQUENCE = """
<ir_version: 9, opset_import: ["" : 18]>
main (float[B, 3, S, 8] q, float[B, 3, T, 8] k, float[B, 3, T, 8] v) => (float[B, 2, S, 8] y)
<{stated}>
{{ kt = Transpose <perm = [0, 1, 3, 2]> (k)
  s = MatMul (q, kt)
  p = Softmax <axis = -1> (s)
  r = MatMul (p, v)
  sizes = Constant <value = int64[2] {{1, 2}}> ()
  parts = SplitToSequence <axis = 1> (r, sizes)
  one = Constant <value = int64 {{1}}> ()
  y = SequenceAt (parts, one) }}
"""
WRONG = "float[B, n, S, 8] parts"
RIGHT = "seq(float[B, n, S, 8]) parts"


def sequence(stated: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(SEQUENCE.format(stated=stated))


def feeds() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.standard_normal((2, 3, n, 8)).astype(np.float32) for n in (5, 7, 7)]


@pytest.mark.parametrize("stated", [WRONG, RIGHT])
def test_a_file_that_calls_a_sequence_a_tensor_is_proven_and_loads(stated: str, tmp_path: Path) -> None:
    onnx.save(sequence(stated), tmp_path / "in.onnx")
    options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx")
    result = pipeline.run(options, Talk(quiet=True))
    document = result.report["check"]
    assert isinstance(document, dict)
    assert document["warnings"] == []
    assert {r["reference"] for r in document["runs"]} == {"float64"}
    right = run(sequence(RIGHT).SerializeToString(), feeds())[0]
    np.testing.assert_allclose(run((tmp_path / "out.onnx").read_bytes(), feeds())[0], right, atol=3e-6, rtol=0)


def test_from_python_it_prints_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest, without which Python prints warnings
    monkeypatch.setattr(pipeline, "drop_contradicted", lambda model: 0)
    flash_export.rewrite(sequence(WRONG), check=False)
    assert capfd.readouterr() == ("", "")


def test_a_file_that_onnx_runtime_does_not_load_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (check, pipeline):
        monkeypatch.setattr(module, "drop_contradicted", lambda model: 0)
    onnx.save(sequence(WRONG), tmp_path / "in.onnx")
    talk = Talk(quiet=True)
    result = pipeline.run(Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx"), talk)
    document = result.report["check"]
    assert isinstance(document, dict)
    (warning,) = document["warnings"]
    assert warning in talk.warnings
    assert f"ONNX Runtime {onnxruntime.__version__} does not load the fused file" in warning
    assert "does not match expected type (seq(tensor(float)))" in warning


def test_a_file_without_bodies_is_not_asked_about(tmp_path: Path) -> None:
    onnx.save(sequence(RIGHT), tmp_path / "in.onnx")
    for fallback in (True, False):
        options = Options(source=tmp_path / "in.onnx", output=tmp_path / "out.onnx", fallback=fallback)
        pipeline.run(options, Talk(quiet=True))
        assert runtime.why_not_loaded(tmp_path / "out.onnx") == ""


@pytest.mark.parametrize("stated", [WRONG, RIGHT, ""])
def test_an_inferred_sequence_is_no_tensor(stated: str) -> None:
    model = ir.from_proto(sequence(stated))
    drop_contradicted(model)
    infer(model)
    values = {v.name: v for node in model.graph for v in node.outputs}
    assert not isinstance(values["parts"].type, ir.TensorType)
    assert values["r"].type == ir.TensorType(ir.DataType.FLOAT)


TYPES = """
<ir_version: 9, opset_import: ["" : 18]>
main (float[B, 4] x, seq(float[4]) many) => (float[4] y)
<float[2] n, bool[2] bits, float[4] zero, float[B, 4] z, seq(float[4]) t>
{ n = Shape (x)
  bits = IsNaN (x)
  zero = Identity (z)
  z = Relu (x)
  one = Constant <value = int64 {1}> ()
  t = Relu (x)
  y = SequenceAt (many, one) }
"""


def test_only_what_cannot_be_is_dropped() -> None:
    model = ir.from_proto(onnx.parser.parse_model(TYPES))
    assert drop_contradicted(model) == 2
    types = {v.name: v.type for node in model.graph for v in node.outputs}
    assert types["n"] is types["t"] is None
    assert types["bits"] == ir.TensorType(ir.DataType.BOOL)
    assert types["z"] == types["zero"] == types["y"] == ir.TensorType(ir.DataType.FLOAT)
    assert drop_contradicted(model) == 0
