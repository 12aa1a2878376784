# SPDX-License-Identifier: Apache-2.0
"""One's own attention pattern: a model with an operator that flash-export does not know, fused and proven all the same.

Writes a model with ``acme::TemperedAttention`` (a function in the file says what it computes), shows why flash-export
leaves it alone, adds the pattern of ``tempered_attention.py``, exports it, and builds an engine of it, which runs where
a GPU is.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper, parser

import flash_export
import flash_trt
from flash_export.talk import Talk
from flash_trt.build import BuildOptions, build

DOMAIN, NAME = "acme", "TemperedAttention"
HEADS, WIDTH, TEMPERATURE = 4, 60, 1.7
ENGINE_TOLERANCE = 1e-2
"""Of the largest output: TensorRT multiplies fp32 matrices in TF32."""

BODY = f"""
<domain: "{DOMAIN}", opset_import: ["" : 18]>
{NAME} <heads, temperature> (query, key, value) => (output)
{{
  apart = Constant <value = int64[4] {{0, 0, {HEADS}, -1}}> ()
  together = Constant <value = int64[3] {{0, 0, -1}}> ()
  one = Constant <value = int64[1] {{1}}> ()
  q_apart = Reshape (query, apart)
  k_apart = Reshape (key, apart)
  v_apart = Reshape (value, apart)
  q = Transpose <perm = [0, 2, 1, 3]> (q_apart)
  k = Transpose <perm = [0, 2, 3, 1]> (k_apart)
  v = Transpose <perm = [0, 2, 1, 3]> (v_apart)
  products = MatMul (q, k)
  size = Shape <start = 3, end = 4> (q)
  size_float = Cast <to = 1> (size)
  root = Sqrt (size_float)
  heat = Constant <value_float: float = @temperature> ()
  divisor = Mul (root, heat)
  scores = Div (products, divisor)
  lengths = Shape <start = 2, end = 4> (scores)
  ones = ConstantOfShape <value = float[1] {{1.0}}> (lengths)
  lower = Trilu <upper = 0> (ones)
  visible = Cast <to = 9> (lower)
  hidden = Constant <value_float = -1.0e3> ()
  masked = Where (visible, scores, hidden)
  probs = Softmax <axis = -1> (masked)
  heads_out = MatMul (probs, v)
  rows_first = Transpose <perm = [0, 2, 1, 3]> (heads_out)
  output = Reshape (rows_first, together)
}}
"""


def main() -> int:
    """Runs the whole sample; returns 0 when every step did what it should."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("build/own_pattern"), help="where the files go")
    out = arguments.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    model = write_model(out / "model.onnx")
    fused = out / "model.flash.onnx"
    before = flash_export.rewrite(model)
    for site in before.refused:
        print(f"without the pattern {site.name} is refused: {site.reason.text if site.reason else ''}")
    importlib.import_module("tempered_attention")  # registers its reader, as --pattern tempered_attention does
    after = flash_export.rewrite(model, output=fused)
    print(f"fused without the pattern: {len(before.fused)}, with it: {len(after.fused)}, and proven")
    if [(len(done.fused), len(done.refused)) for done in (before, after)] != [(0, 1), (1, 0)]:
        return 1
    engine = out / "model.flash.engine"
    shape = f"x:1x1x{WIDTH},2x37x{WIDTH},4x512x{WIDTH}"
    sidecar = build(BuildOptions(fused, engine, shapes=(shape,)), Talk(quiet=True))
    print(f"{engine.name}: attention by {', '.join(found['by'] for found in sidecar['attention'])}")
    run_engine(model, engine)
    return 0


def run_engine(model: Path, engine: Path) -> None:
    """Runs the engine where a GPU is, and ends the sample when it and the operator's own function disagree."""
    if why := flash_trt.why_not_here(engine):
        print(f"The engine is not run here: {why}. On one, this same command runs it too.")
        return
    x = np.random.default_rng(1).standard_normal((2, 37, WIDTH)).astype(np.float32)
    expected = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    session = flash_trt.open_engine(engine)
    try:
        error = float(np.abs(session.run({"x": x})["output"] - expected).max() / np.abs(expected).max())
        who = session.implementation()
    finally:
        session.close()
    if not error <= ENGINE_TOLERANCE:
        sys.exit(f"the engine and {DOMAIN}::{NAME} disagree: error {error:.1e}")
    print(f"{who}: as {DOMAIN}::{NAME} itself, to {error:.1e}")


def write_model(path: Path) -> Path:
    """Projections around one ``acme::TemperedAttention``, with its function on board."""
    rng = np.random.default_rng(0)
    names = ("query", "key", "value")
    weights = [
        numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8, f"w_{n}") for n in names
    ]
    nodes = [helper.make_node("MatMul", ["x", f"w_{name}"], [name]) for name in names]
    nodes.append(
        helper.make_node(
            NAME, list(names), ["output"], name="attention", domain=DOMAIN, heads=HEADS, temperature=TEMPERATURE
        )
    )
    dims = ["batch", "seq", WIDTH]
    graph = helper.make_graph(
        nodes,
        "acme",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, dims)],
        weights,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    functions = [parser.parse_function(BODY)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions), path)  # noqa: TID251
    return path


if __name__ == "__main__":
    sys.exit(main())
