# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime's own operators (``com.microsoft``) make of shapes, as far as optimized transformers hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from flash_export import graph as g
from flash_export.dims import Dim, Shape

if TYPE_CHECKING:
    from flash_export.shapes import Shapes

CONTRIB_DOMAIN = "com.microsoft"

_UNARY_NAMES = (
    "BiasGelu FastGelu Gelu QuickGelu RotaryEmbedding SkipLayerNormalization SkipSimplifiedLayerNormalization"
)


def _same(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.shape(node.inputs[0])]


def _multihead(s: Shapes, node: ir.Node) -> list[Shape | None]:
    query, value = s.shape(node.inputs[0]), s.shape(g.input_of(node, 2))
    if query is None:
        return [None]
    if len(query) == 5:
        return [(query[0], query[1], query[2] * query[4])]
    if value is not None and len(value) == 4:
        return [(*query[:2], value[1] * value[3])]
    return [(*query[:2], query[2] if value is None else value[2])]


def _group_query(s: Shapes, node: ir.Node) -> list[Shape | None]:
    query = s.shape(node.inputs[0])
    if query is None or g.input_of(node, 1) is not None:
        return [query]
    heads, kv_heads = (g.int_attribute(node, name, 1) for name in ("num_heads", "kv_num_heads"))
    depth = query[2].divided(Dim.of(heads + 2 * kv_heads))
    return [None if depth is None else (*query[:2], depth * Dim.of(heads))]


def _packed_weights(s: Shapes, node: ir.Node) -> list[Shape | None]:
    source, weights, sizes = (
        s.shape(node.inputs[0]),
        s.shape(node.inputs[1]),
        g.ints_attribute(node, "qkv_hidden_sizes"),
    )
    if source is None or weights is None:
        return [None]
    width = weights[1].divided(Dim.of(3)) if sizes is None else Dim.of(sizes[2])
    return [None if width is None else (*source[:2], width)]


CONTRIB_SHAPE_RULES: dict[str, Callable[[Shapes, ir.Node], list[Shape | None]]] = {
    **dict.fromkeys(_UNARY_NAMES.split(), _same),
    "MultiHeadAttention": _multihead,
    "GroupQueryAttention": _group_query,
    "Attention": _packed_weights,
}
