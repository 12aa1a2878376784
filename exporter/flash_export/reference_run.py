# SPDX-License-Identifier: Apache-2.0
"""Runs the nodes of onnx's reference evaluator, each result in memory no longer than somebody still reads it.

The evaluator's own ``run`` keeps every result until its end: of a model with hundreds of operators hundreds of tensors.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator

Look = Callable[[Any, list[Any]], None]
"""Sees a node of the evaluator and its inputs before it runs; what it raises ends the run."""


def run_nodes(
    evaluator: ReferenceEvaluator, feeds: Mapping[str, np.ndarray], wanted: Sequence[str], look: Look | None = None
) -> list[Any]:
    """The results named ``wanted``, as ``ReferenceEvaluator.run`` gives them.

    Raises:
        Exception: whatever NumPy raises in an operator, or ``look``.
    """
    results: dict[str, Any] = {"": None, **evaluator.rt_inits_, **feeds}
    nodes = evaluator.rt_nodes_
    readers = Counter(name for node in nodes for name in _touched(node))
    by_name = any(node.need_context() for node in nodes)  # the bodies of If, Loop and Scan read any result
    readers.update(dict.fromkeys(readers if by_name else ("", *wanted), sys.maxsize))
    for node in nodes:
        inputs = [results[name] for name in node.input]
        if look is not None:
            look(node, inputs)
        outputs = node.run(*inputs, context=results) if node.need_context() else node.run(*inputs)
        results.update(zip(node.output, outputs, strict=False))
        del inputs, outputs
        for name in _touched(node):
            readers[name] -= 1
            if not readers[name]:
                results.pop(name, None)
    return [results[name] for name in wanted]


def _touched(node: Any) -> list[str]:
    return [*dict.fromkeys(node.input), *node.output]
