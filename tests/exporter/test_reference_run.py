# SPDX-License-Identifier: Apache-2.0
"""onnx's reference evaluator, run node by node: the same results, each kept no longer than it is read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from flash_export.reference_run import run_nodes

HEADER = '<ir_version: 9, opset_import: ["": 18, "local": 1]>\n'
BRANCHES = """g (float[n] x) => (float[n] y) <bool yes = {1}> {
    a = Neg (x)
    unused = Abs (a)
    b = If (yes) <
      then_branch = t () => (float[n] c) { c = Mul (a, x) }, else_branch = e () => (float[n] d) { d = Add (x, x) }>
    y = Exp (b)
}"""
FUNCTION = """g (float[n] x) => (float[n] y, float[n] z) { z = Neg (x)  y = local.Double (z, x) }
    <domain: "local", opset_import: ["": 18]> Double (p, q) => (r) { s = Add (p, p)  r = Mul (s, q) }"""
LEFT_OUT = "g (float[n] x) => (float[n] y) <float high = {0.5}> { y = Clip (x, , high) }"


@pytest.mark.parametrize("text", [BRANCHES, FUNCTION, LEFT_OUT])
def test_the_results_are_those_of_the_evaluators_own_run(text: str) -> None:
    evaluator = ReferenceEvaluator(onnx.parser.parse_model(HEADER + text))
    feeds = {"x": np.array([0.25, -2.0, 3.0], np.float32)}
    for one, other in zip(run_nodes(evaluator, feeds, evaluator.output_names), evaluator.run(None, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_result_is_let_go_after_its_last_reader() -> None:
    count, size = 40, 100_000
    lines = " ".join(f"v{i + 1} = Neg (v{i})" for i in range(count))
    evaluator = ReferenceEvaluator(
        onnx.parser.parse_model(f"{HEADER} g (float[n] v0) => (float[n] v{count}) {{ {lines} }}")
    )
    feeds = {"v0": np.ones(size, np.float32)}
    tracemalloc.start()
    (result,) = run_nodes(evaluator, feeds, [f"v{count}"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.sum() == size
    assert peak < 4 * feeds["v0"].nbytes


def test_who_looks_may_end_the_run_before_a_node() -> None:
    def look(node: object, inputs: list) -> None:
        if node.op_type == "Exp":  # type: ignore[attr-defined]
            raise MemoryError(str(inputs[0]))

    evaluator = ReferenceEvaluator(onnx.parser.parse_model(HEADER + BRANCHES))
    with pytest.raises(MemoryError, match=r"-1\."):
        run_nodes(evaluator, {"x": np.array([1.0], np.float32)}, ["y"], look)
