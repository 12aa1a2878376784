# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime's own operators (``com.microsoft``) make of shapes, as far as optimized transformers hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from flash_export import graph as g
from flash_export.contrib_product import CONTRIB_DOMAIN, as_multiplied
from flash_export.dims import ONE, Dim, Shape

if TYPE_CHECKING:
    from flash_export.shapes import Shapes

Rule = Callable[["Shapes", ir.Node], "list[Shape | None]"]

_UNARY_NAMES = "BiasAdd BiasGelu BiasSoftmax FastGelu Gelu GemmaRotaryEmbedding GroupNorm QuickGelu RotaryEmbedding"
SKIPPING = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
"""Norms of a sum; output 3 is the sum itself, of the input's type."""


def _same(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.shape(g.input_of(node, 0))]


def _of_rank(s: Shapes, node: ir.Node, index: int, *ranks: int) -> Shape | None:
    """The shape of an input, where it has one of the ranks that the operator's text gives it."""
    shape = s.shape(g.input_of(node, index))
    return shape if shape is not None and len(shape) in ranks else None


def _same_twice(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """The normalised sum and the sum itself."""
    return 2 * _same(s, node)


def _halved(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """One half of the last axis times the other."""
    shape = s.shape(g.input_of(node, 0)) or None
    width = None if shape is None else shape[-1].divided(Dim.of(2))
    return [None if shape is None else (*shape[:-1], s.fresh() if width is None else width)]


def _channels_last(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """A Conv of ``[N, H, W, C]`` by ``[M, kH, kW, C / group]``."""
    shape, weight = _of_rank(s, node, 0, 4), _of_rank(s, node, 1, 4)
    return [None if shape is None or weight is None else (shape[0], s.fresh(), s.fresh(), weight[0])]


def _skipping(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """The normalised sum, two statistics a row, and the sum itself."""
    shape = s.broadcast([s.shape(v) for v in node.inputs[:2]])
    rows = None if shape is None else (*shape[:-1], ONE)
    return [shape, rows, rows, shape]


def _embedding(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """Normalised sum of embeddings ``[B, S, W]``, the mask's lengths ``[B]``, and the sum itself."""
    tokens, table = _of_rank(s, node, 0, 2), _of_rank(s, node, 2, 2)
    if tokens is None or table is None:
        return [None]
    whole = (*tokens, table[-1])
    return [whole, tokens[:1], whole]


def _fused_product(s: Shapes, node: ir.Node) -> list[Shape | None]:
    a, b = s.shape(g.input_of(node, 0)), s.shape(g.input_of(node, 1))
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return [None]
    left, right = as_multiplied(node, a, "A"), as_multiplied(node, b, "B")
    batch = s.broadcast([tuple(left[:-2]), tuple(right[:-2])])
    return [None if batch is None else (*batch, left[-2], right[-1])]


def _packed_bits(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """A product with quantized weights: their width is an attribute."""
    shape, width = s.shape(g.input_of(node, 0)), g.int_attribute(node, "N", 0)
    return [None if shape is None or not width else (*shape[:-1], Dim.of(width))]


def _multihead(s: Shapes, node: ir.Node) -> list[Shape | None]:
    query, value = _of_rank(s, node, 0, 3, 5), _of_rank(s, node, 2, 3, 4)
    if query is None:
        return [None]
    if len(query) == 5:
        return [(query[0], query[1], query[2] * query[4])]
    if value is not None and len(value) == 4:
        return [(*query[:2], value[1] * value[3])]
    return [(*query[:2], query[2] if value is None else value[2])]


def _group_query(s: Shapes, node: ir.Node) -> list[Shape | None]:
    query = _of_rank(s, node, 0, 3)
    if query is None or g.input_of(node, 1) is not None:
        return [query]
    heads, kv_heads = (g.int_attribute(node, name, 1) for name in ("num_heads", "kv_num_heads"))
    depth = query[2].divided(Dim.of(heads + 2 * kv_heads))
    return [None if depth is None else (*query[:2], depth * Dim.of(heads))]


def _packed_weights(s: Shapes, node: ir.Node) -> list[Shape | None]:
    source, weights, sizes = (
        _of_rank(s, node, 0, 3),
        _of_rank(s, node, 1, 2),
        g.ints_attribute(node, "qkv_hidden_sizes"),
    )
    if source is None or weights is None:
        return [None]
    width = weights[1].divided(Dim.of(3)) if sizes is None else Dim.of(sizes[2] if len(sizes) == 3 else 0)
    return [None if width is None else (*source[:2], width)]


def _blocked(s: Shapes, node: ir.Node) -> list[Shape | None]:
    """A Conv or a pooling of blocked channels: only the batch is known."""
    shape = s.shape(g.input_of(node, 0)) or None
    return [None if shape is None else (shape[0], *(s.fresh() for _ in shape[1:]))]


def _unblocked(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape, channels = s.shape(g.input_of(node, 0)) or None, g.int_attribute(node, "channels", 0)
    if shape is None or not channels or g.int_attribute(node, "channels_last", 0):
        return [None if shape is None else (shape[0], *(s.fresh() for _ in shape[1:]))]
    return [(shape[0], Dim.of(channels), *shape[2:])]


_OPERATORS: dict[str, Rule] = {
    **dict.fromkeys(_UNARY_NAMES.split(), _same),
    **dict.fromkeys(SKIPPING, _skipping),
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul"), _fused_product),
    **dict.fromkeys(("MatMulBnb4", "MatMulNBits"), _packed_bits),
    "BiasSplitGelu": _halved,
    "EmbedLayerNormalization": _embedding,
    "NhwcConv": _channels_last,
    "SkipGroupNorm": _same_twice,
    "MultiHeadAttention": _multihead,
    "GroupQueryAttention": _group_query,
    "Attention": _packed_weights,
}
_BLOCKED = ("AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReorderInput", "Upsample")
CONTRIB_SHAPE_RULES: dict[str, dict[str, Rule]] = {
    CONTRIB_DOMAIN: _OPERATORS,
    CONTRIB_DOMAIN + ".nchwc": {**dict.fromkeys(_BLOCKED, _blocked), "ReorderOutput": _unblocked},
}
"""Domain -> operator -> its rule. ``nchwc`` is the layout in which ONNX Runtime convolves on a CPU."""
