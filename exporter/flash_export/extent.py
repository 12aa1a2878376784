# SPDX-License-Identifier: Apache-2.0
"""How large the tensors of a model get at given sizes, so that no run for a proof takes memory out of proportion.

Scores are queries x keys, and logits have the width of a vocabulary: at sizes that are harmless for one model another
one asks for tens of gigabytes. Scores inside an operator of attention, a function or a branch are no value of the
graph, and some have no known shape: they are taken for heads x longest length x longest length.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from flash_export.dims import Dim
from flash_export.draw import dynamic_dims
from flash_export.shapes import Shapes

_HEADS = ("num_heads", "q_num_heads")
"""Attributes of operators of attention: ONNX Runtime's, and ONNX's own and ours."""
_SOME_HEADS = 16
"""Where no attribute says how many: most models have 8 to 32."""


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
        dims = dynamic_dims(model)
        self._batches = {name for name, is_batch in dims.items() if is_batch}
        told = {self._same(name) for name in dims}
        untold = {
            value
            for value in _computed(model.graph)
            if value.name not in self._counts or not self._counts[value.name].symbols <= told
        }
        self._heads = _heads_inside(model, untold)

    @property
    def names(self) -> Collection[str]:
        """The values of known shape."""
        return self._counts.keys()

    def elements(self, name: str, sizes: Mapping[str, int]) -> int:
        """The number of elements of a value; 0 where it is not known."""
        return self._evaluated(self._counts.get(name, Dim({})), self._known(sizes))

    def largest(self, sizes: Mapping[str, int]) -> int:
        """The number of elements of the largest value, and of the largest scores inside operators and bodies."""
        known = self._known(sizes)
        rows = math.prod(size for name, size in sizes.items() if name in self._batches)
        longest = max((size for name, size in sizes.items() if name not in self._batches), default=0)
        inside = rows * self._heads * longest**2
        return max([inside, *(self._evaluated(count, known) for count in set(self._counts.values()))])

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


def _heads_inside(model: ir.Model, untold: Collection[ir.Value]) -> int:
    """The most heads of an attention whose scores are ``untold`` or no value of the graph; 0 where there is none."""
    written_out, found = set(model.graph), 0
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for node in (node for body in bodies for node in ir.traversal.RecursiveGraphIterator(body)):
        if "Attention" in node.op_type:
            told = [node.attributes[name] for name in _HEADS if name in node.attributes]
            heads = [one.as_int() for one in told if one.type == ir.AttributeType.INT and not one.is_ref()]
            found = max(found, *heads, 0 if heads else _SOME_HEADS)
        elif node.op_type == "Softmax" and (node not in written_out or node.outputs[0] in untold):
            found = max(found, _SOME_HEADS)
    return found


def _product(dims: list[Dim]) -> Dim:
    count = Dim.of(1)
    for dim in dims:
        count = count * dim
    return count
