# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's operators that it has no CPU kernel for, written in operators that it has one for.

Its optimizer makes them for GPUs. Without this a model that holds one runs nowhere here, and nothing in it could be
proven. Each is written as the operator's text defines it (docs/ContribOperators.md of ONNX Runtime).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from flash_export import contrib_images
from flash_export import graph as g
from flash_export.contrib_product import CONTRIB_DOMAIN

Written = tuple[list[ir.Node], list[ir.Value]]
"""The nodes that take an operator's place, and the values that take those of its outputs; nobody reads the others."""


def write_out(model: ir.Model) -> None:
    """Replaces every such operator of the graph, its subgraphs and functions, in place. Names of values stay."""
    for graph in _graphs(model):
        for node in list(graph):
            writer = _WRITERS.get(node.op_type) if node.domain == CONTRIB_DOMAIN else None
            written = None if writer is None else writer(node)
            if written is not None:
                _replace(graph, node, *written)


def _graphs(model: ir.Model) -> Iterator[ir.Graph | ir.Function]:
    yield from model.graphs()
    yield from model.functions.values()


def _replace(graph: ir.Graph | ir.Function, node: ir.Node, nodes: list[ir.Node], results: list[ir.Value]) -> None:
    made = node.outputs[0].name
    for index, new in enumerate(nodes):
        for value in new.outputs:
            value.name = value.name or f"{made}/written_out_{index}"
    node.append(nodes)
    for old, result in zip(node.outputs, results, strict=False):
        result.type, result.shape = old.type, old.shape
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        result.name, old.name = old.name, f"{old.name}/in_one"
    for extra in node.outputs[len(results) :]:
        assert not extra.uses(), "an operator with more outputs is written out only where nobody reads them"
    graph.remove(node, safe=False)


def _bias_softmax(node: ir.Node) -> Written:
    """Softmax over ``data + bias``, whichever of the two's axes the bias lacks."""
    total = ir.node("Add", node.inputs[:2])
    softmax = ir.node("Softmax", [total.outputs[0]], {"axis": g.int_attribute(node, "axis", 1)})
    return [total, softmax], [softmax.outputs[0]]


def _packed_multihead(node: ir.Node) -> Written | None:
    """Q, K and V apart, of ``[B, S, H, 3, D]`` or, beside a query, ``[B, S, H, 2, D]``."""
    query, key, value = (g.input_of(node, i) for i in range(3))
    if value is not None or query is None or any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        return None
    packed, first = (query, []) if key is None else (key, [query])
    if key is not None and (key.shape is None or len(key.shape) != 5):
        return None
    target = ir.node("Constant", [], {"value": ir.tensor(np.array([0, 0, -1], np.int64))})
    nodes, parts = [target], list(first)
    for index in range(3 - len(first)):
        at = ir.node("Constant", [], {"value": ir.tensor(np.array(index, np.int64))})
        part = ir.node("Gather", [packed, at.outputs[0]], {"axis": 3})
        flat = ir.node("Reshape", [part.outputs[0], target.outputs[0]])
        nodes += [at, part, flat]
        parts.append(flat.outputs[0])
    apart = ir.Node(CONTRIB_DOMAIN, "MultiHeadAttention", [*parts, *node.inputs[3:]], list(node.attributes.values()))
    return [*nodes, apart], [apart.outputs[0]]


_WRITERS: dict[str, Callable[[ir.Node], Written | None]] = {
    "BiasAdd": contrib_images.bias_add,
    "BiasSoftmax": _bias_softmax,
    "BiasSplitGelu": contrib_images.bias_split_gelu,
    "GroupNorm": contrib_images.group_norm,
    "MultiHeadAttention": _packed_multihead,
    "NhwcConv": contrib_images.nhwc_conv,
    "SkipGroupNorm": contrib_images.group_norm,
}
"""Operator of com.microsoft -> its writer; None from it where the operator has a kernel as it stands."""
