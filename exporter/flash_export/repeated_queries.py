# SPDX-License-Identifier: Apache-2.0
"""Runs of the unfused model in which an operand made more scores than Q and K have.

A mask of two queries, or of a length with a name of its own, broadcasts against the only query of another input: the
graph runs, on what it is not for. The node refuses that, which says nothing of the numbers that it gives elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from flash_export import graph as g
from flash_export.region import users

_MOST_NODES = 512
"""Between a product and its softmax; a site with more is refused."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The names of a product of Q and K and of what the softmax reads, and the columns concatenated between the two."""

    product: str
    scores: str
    columns: int


def spans_below(model: ir.Model, products: Sequence[str]) -> list[Span]:
    """One span for each of ``products``, names of the graph's values, below which a softmax is found."""
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    found = ((name, _scores_below(values[name])) for name in products)
    return [Span(name, str(end[0].name), end[1]) for name, end in found if end is not None and end[0].name]


def _scores_below(product: ir.Value) -> tuple[ir.Value, int] | None:
    """What the nearest softmax below reads, and how many columns a sink has put there."""
    todo, seen = deque([(product, 0)]), {product}
    while todo and len(seen) <= _MOST_NODES:
        value, columns = todo.popleft()
        for node in users(value):
            if node.op_type in ("Softmax", "BiasSoftmax"):
                return value, columns
            made = node.outputs[0]
            if made not in seen:
                seen.add(made)
                todo.append((made, columns + g.is_op(node, "Concat")))
    return None


def why_repeated(spans: Sequence[Span], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Why a run is on more queries than there are; empty where each of ``spans`` has the scores of its product.

    Args:
        shapes: the name of each product and of each softmax's scores -> its shape in that run.
    """
    for span in spans:
        product, scores = shapes[span.product], shapes[span.scores]
        own = (*scores[:-1], scores[-1] - span.columns)
        if math.prod(own) != math.prod(product):
            return (
                f"{span.scores} has shape {list(scores)} where the product of Q and K, {span.product}, is"
                f" {list(product)}: a mask, a bias or a factor is longer than Q or K, and repeats them"
            )
    return ""
