# SPDX-License-Identifier: Apache-2.0
"""How large the tensors of a model get at given sizes, so that no run for a proof takes memory out of proportion.

Scores are queries x keys, and logits have the width of a vocabulary: at sizes that are harmless for one model another
one asks for tens of gigabytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from flash_export.dims import Dim
from flash_export.shapes import Shapes


class Extent:
    """The sizes of the values that a model computes from its inputs, as far as its shapes are known.

    What it computes from weights alone, such as the transpose of a table of embeddings, is there at any sizes.
    """

    def __init__(self, model: ir.Model) -> None:
        shapes = Shapes(model.graph)
        self._same = shapes.representative
        self._counts: dict[str, Dim] = {}
        for value in _computed(model.graph):
            shape = shapes.shape(value)
            if shape is not None:
                self._counts[value.name or ""] = _product([shapes.normal(dim) for dim in shape])

    @property
    def names(self) -> Collection[str]:
        """The values of known shape."""
        return self._counts.keys()

    def elements(self, name: str, sizes: Mapping[str, int]) -> int:
        """The number of elements of a value; 0 where it is not known."""
        return self._evaluated(self._counts.get(name, Dim({})), self._known(sizes))

    def largest(self, sizes: Mapping[str, int]) -> int:
        """The number of elements of the largest value."""
        known = self._known(sizes)
        return max((self._evaluated(count, known) for count in set(self._counts.values())), default=0)

    def _known(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {self._same(name): size for name, size in sizes.items()}

    @staticmethod
    def _evaluated(count: Dim, known: Mapping[str, int]) -> int:
        return max(0, count.evaluate(known)) if count.symbols <= known.keys() else 0


def _computed(graph: ir.Graph) -> list[ir.Value]:
    """The inputs of ``graph`` and what depends on them; all that a node with graphs of its own gives counts as that."""
    found = dict.fromkeys(graph.inputs)
    for node in graph:
        branches = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        if branches or any(value in found for value in node.inputs):
            found |= dict.fromkeys(node.outputs)
    return list(found)


def _product(dims: list[Dim]) -> Dim:
    count = Dim.of(1)
    for dim in dims:
        count = count * dim
    return count
