# SPDX-License-Identifier: Apache-2.0
"""How large scores get inside an attention operator, which shows none: read off the fused node's own query and key."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from flash_export.op import DOMAIN, FLASH_ATTENTION_PACKED, LAYOUT_BHSD, OPERATORS
from flash_export.sites import Site

PREFIX = "flash_export/largest_scores_of/"
"""What the name of a probe's output begins with; the site's name follows."""

_MOST_STEPS = 8


def add_score_probes(flash: ir.Model, sites: Collection[Site]) -> tuple[ir.Model, list[str]]:
    """A copy with one more output for each site: the largest magnitude of its scale * Q.K^T, a scalar.

    That is the product as an operator forms it: ONNX's ``Attention`` puts the scale on Q and K before it.

    Returns:
        The copy, and the names of the new outputs.
    """
    probed = flash.clone()
    values = ir.convenience.create_value_mapping(probed.graph, include_subgraphs=False)
    added = []
    for site in sites:
        node = flash_node(values.get(site.output))
        if node is not None and site.head_dim is not None:
            added.append(f"{PREFIX}{site.name}")
            probed.graph.outputs.append(_largest(node, added[-1], site.head_dim))
    return probed, added


def flash_node(value: ir.Value | None) -> ir.Node | None:
    """The FlashAttention node above the layout operators that end in ``value``."""
    for _ in range(_MOST_STEPS):
        node = None if value is None else value.producer()
        if node is None or (node.domain == DOMAIN and node.op_type in OPERATORS):
            return node
        value = node.inputs[0] if node.inputs else None
    return None


def _largest(node: ir.Node, name: str, head_dim: int) -> ir.Value:
    nodes: list[ir.Node] = []

    def op(kind: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        nodes.append(ir.node(kind, inputs, attributes))  # type: ignore[arg-type]
        return nodes[-1].outputs[0]

    def numbers(*content: float, dtype: type = np.int64) -> ir.Value:
        return op("Constant", value=ir.tensor(np.array(content, dtype)))

    query, key = _operands(node, head_dim, op, numbers)
    heads, kv_heads = (node.attributes[n].as_int() for n in ("q_num_heads", "kv_num_heads"))
    columns = op("Transpose", key, perm=[0, 1, 3, 2])
    if heads != kv_heads:
        columns = op("Gather", columns, numbers(*(i * kv_heads // heads for i in range(heads))), axis=1)
    sizes = op("Reshape", op("Abs", op("MatMul", query, columns)), numbers(-1))
    largest = op("ReduceMax", op("Concat", sizes, numbers(0, dtype=np.float32), axis=0), keepdims=0)
    scale = abs(node.attributes["scale"].as_float())
    result = op("Mul", largest, op("Constant", value=ir.tensor(np.float32(scale))))
    result.name, result.type, result.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(())
    node.append(nodes)
    return result


def _operands(
    node: ir.Node, head_dim: int, op: Callable[..., ir.Value], numbers: Callable[..., ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Query and key as ``[B, H, S, D]``."""
    heads, kv_heads, layout = (node.attributes[n].as_int() for n in ("q_num_heads", "kv_num_heads", "layout"))
    given = [value for value in node.inputs[:2] if value is not None]
    if node.op_type == FLASH_ATTENTION_PACKED.name:
        apart = op("Reshape", given[0], numbers(0, 0, heads + 2 * kv_heads, head_dim))
        ends = (0, heads), (heads, heads + kv_heads)
        query, key = (op("Slice", apart, numbers(a), numbers(b), numbers(2)) for a, b in ends)
    elif layout == LAYOUT_BHSD:
        return given[0], given[1]
    else:
        query, key = (
            op("Reshape", v, numbers(0, 0, n, head_dim)) for v, n in zip(given, (heads, kv_heads), strict=True)
        )
    return op("Transpose", query, perm=[0, 2, 1, 3]), op("Transpose", key, perm=[0, 2, 1, 3])
