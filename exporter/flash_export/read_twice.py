# SPDX-License-Identifier: Apache-2.0
"""Probabilities that several products read: a softmax for each, so that each product is an attention of its own.

Differential transformers multiply what one softmax gives with two tensors (arXiv 2410.05258, equation 1).
"""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import name_of
from flash_export.region import is_product, users

_MOST_NODES = 8
"""Operators from a softmax to its products: casts, a dropout, a guard against NaN, layouts."""


def separate(graph: ir.Graph, wanted: Container[str]) -> dict[str, list[str]]:
    """Gives every product but the first below a softmax a copy of all that lies between.

    Args:
        graph: what is changed.
        wanted: names of the softmaxes that may be copied.

    Returns:
        The softmaxes with more than one product -> the names of their copies.
    """
    taken = {str(v.name) for node in graph.all_nodes() for v in node.outputs} | {str(v.name) for v in graph.inputs}
    found: dict[str, list[str]] = {}
    for node in list(graph):
        if not g.is_op(node, "Softmax") or name_of(node) not in wanted:
            continue
        between, products = _below(node)
        for number, product in enumerate(products[1:], 2):
            copy = _copied(between, product, number, taken)
            found.setdefault(name_of(node), []).append(name_of(copy))
    return found


def _below(softmax: ir.Node) -> tuple[list[ir.Node], list[ir.Node]]:
    """The operators from the softmax to the products that read it, and these; none where others read it as well."""
    between, products, todo = [softmax], list[ir.Node](), [softmax]
    while todo:
        node = todo.pop()
        for value in node.outputs:
            if value.is_graph_output():
                return [], []
            for reader in users(value):
                if reader.graph is not softmax.graph or any(map(g.graphs_of, reader.attributes.values())):
                    return [], []
                if is_product(reader):
                    products += [reader] if reader not in products else []
                elif reader not in between:
                    between.append(reader)
                    todo.append(reader)
        if len(between) > _MOST_NODES:
            return [], []
    order = {node: place for place, node in enumerate(softmax.graph or ())}
    return sorted(between, key=order.__getitem__), sorted(products, key=order.__getitem__)


def _copied(between: list[ir.Node], product: ir.Node, number: int, taken: set[str]) -> ir.Node:
    """Puts a copy of ``between`` before the product, which reads it from now on; returns the softmax of the copy."""
    new: dict[ir.Value | None, ir.Value] = {}
    nodes = []
    for node in between:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [new.get(v, v) for v in node.inputs],
            node.attributes.values(),
            num_outputs=len(node.outputs),
            version=node.version,
            name=f"{name_of(node)}#{number}",
        )
        for old, value in zip(node.outputs, copy.outputs, strict=True):
            value.name, value.type, value.shape = _free(f"{old.name}#{number}", taken), old.type, old.shape
            new[old] = value
        nodes.append(copy)
    assert product.graph is not None
    product.graph.insert_before(product, nodes)
    for index, read in enumerate(product.inputs):
        if read in new:
            product.replace_input_with(index, new[read])
    return nodes[0]


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "#"
    taken.add(name)
    return name
