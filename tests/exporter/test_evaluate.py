# SPDX-License-Identifier: Apache-2.0
"""What depends on lengths alone is evaluated at any lengths; what depends on data is not evaluated at all."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import model

from flash_export.evaluate import Evaluator, NotEvaluable
from flash_export.shapes import Shapes


def evaluator_of(
    body: str, outputs: str, inputs: str = graphs.QKV, constants: str = graphs.CONSTANTS
) -> tuple[Evaluator, dict[str, ir.Value]]:
    converted = ir.from_proto(model(body, inputs=inputs, outputs=outputs, constants=constants))
    return Evaluator(Shapes(converted.graph), 18), {str(v.name): v for n in converted.graph for v in n.outputs}


def test_a_mask_made_of_lengths_is_computed_at_the_lengths_asked_for() -> None:
    evaluator, values = evaluator_of(graphs.LENGTHS + "keep = LessOrEqual (j, i)\n", "bool[S, T] keep")
    assert {"S", "T"} <= evaluator.symbols(values["keep"])
    sizes = dict.fromkeys(evaluator.symbols(values["keep"]), 2) | {"S": 3, "T": 5}
    np.testing.assert_array_equal(evaluator.evaluate(values["keep"], sizes), np.tri(3, 5, dtype=bool))


@pytest.mark.parametrize(
    "body",
    ["keep = Greater (q, zero)\n", "n = NonZero (q)\n s = Shape (n)\n keep = Greater (s, ax0)\n"],
)
def test_data_and_lengths_that_depend_on_data_are_not_evaluated(body: str) -> None:
    evaluator, values = evaluator_of(body, "bool[N] keep" if "n =" in body else "bool[B, 4, S, 8] keep")
    assert not evaluator.evaluable(values["keep"])
    with pytest.raises(NotEvaluable):
        evaluator.evaluate(values["keep"], {"B": 1, "S": 1, "T": 1})


def test_operators_that_fail_at_some_lengths_say_so() -> None:
    body = graphs.LENGTHS + "three = Unsqueeze (i2, ax0)\n b = Reshape (row, three)\n"
    evaluator, values = evaluator_of(body, "int64[2] b")
    sizes = dict.fromkeys(evaluator.symbols(values["b"]), 2)
    np.testing.assert_array_equal(evaluator.evaluate(values["b"], sizes), [0, 1])
    with pytest.raises(NotEvaluable):
        evaluator.evaluate(values["b"], sizes | {"S": 5})
