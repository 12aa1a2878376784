# SPDX-License-Identifier: Apache-2.0
"""The standard ``Attention`` operator (opset 23 and newer), in its 4-D and its 3-D form.

Its causal mask is aligned at the top left (``tril`` without an offset) as long as there is no past; newer texts word
the offset differently, so that from opset 25 on it is taken only where both alignments agree.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Added, Attention, Hidden, Refused, Term
from flash_export.dims import ONE, Dim
from flash_export.layout import Atom, Axes, Chain, leaves, regroup, size_of, unify
from flash_export.region import Region, follow_tail

INPUTS = ("query", "key", "value", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


ATTRIBUTES = {
    "is_causal",
    "kv_num_heads",
    "q_num_heads",
    "qk_matmul_output_mode",
    "scale",
    "softcap",
    "softmax_precision",
}
"""What opset 23 and 24 define; FlashAttention accumulates in fp32 whatever ``softmax_precision`` asks for."""


def read(anchor: ir.Node, region: Region) -> Attention:
    """The attention that an ``Attention`` node computes.

    Raises:
        Refused: it has a cache, lengths, a second output, an unknown attribute, or a soft cap together with a mask.
    """
    _refuse_extras(anchor)
    query, key, value = (region.operand(_input(anchor, i), anchor, scalars=i < 2) for i in range(3))
    flat = len(query.last) == 3
    q_axes, k_axes, v_axes = (
        _heads_apart(anchor, c, name, flat) for c, name in zip((query, key, value), "qkv", strict=True)
    )
    _unify_operands(anchor, q_axes, k_axes, v_axes, region)
    batch, heads, rows, depth = (leaves(a) for a in q_axes)
    columns, v_depth = leaves(k_axes[2]), leaves(v_axes[3])
    result: Axes = [batch, rows, heads + v_depth] if flat else [batch, heads, rows, v_depth]
    return Attention(
        anchor=anchor,
        query=query,
        key=key,
        value=value,
        batch=batch + heads,
        rows=rows,
        columns=columns,
        depth=depth,
        v_depth=v_depth,
        scale=_scale(anchor, depth),
        softcap=_float(anchor, "softcap", 0.0),
        terms=_mask(anchor, [batch, heads, rows, columns], region),
        tails=follow_tail(anchor.outputs[0], result, region.shapes),
        top_left=_is_causal(anchor, rows, columns, region),
        nodes=[anchor],
    )


def _input(anchor: ir.Node, index: int) -> ir.Value:
    value = g.input_of(anchor, index)
    assert value is not None, "the checker refuses an Attention node without query, key and value"
    return value


def _float(anchor: ir.Node, name: str, default: float) -> float:
    attribute = anchor.attributes.get(name)
    return default if attribute is None else float(attribute.as_float())


def _refuse_extras(anchor: ir.Node) -> None:
    unknown = sorted(set(anchor.attributes) - ATTRIBUTES) + [str(v.name) for v in anchor.inputs[len(INPUTS) :] if v]
    if unknown:
        raise Refused(
            "unknown_attribute",
            f"the operator has {', '.join(unknown)}, which this version does not know",
            anchor,
            "export at opset 23 or 24, or write the mask in standard operators",
        )
    for index, name in enumerate(INPUTS[4:], start=4):
        if g.input_of(anchor, index) is not None:
            raise Refused(
                "kv_cache", f"the input {name} is used", anchor, "concatenate the cache outside the Attention operator"
            )
    for value in anchor.outputs[1:]:
        if value.is_graph_output() or value.uses():
            raise Refused(
                "probabilities_used",
                f'the second output "{value.name}" is used; FlashAttention has the attention output only',
                anchor,
                "export the model without its attention weights or cache",
            )
    masked = g.input_of(anchor, 3) is not None or g.int_attribute(anchor, "is_causal", 0)
    if _float(anchor, "softcap", 0.0) and masked:
        raise Refused(
            "softcap_order",
            "the operator's versions differ on whether the soft cap comes before or after the mask",
            anchor,
            "write the cap and the mask in standard operators, in the order that is meant",
        )


def _heads_apart(anchor: ir.Node, chain: Chain, which: str, flat: bool) -> Axes:
    """``[batch], [heads], [length], [head dim]`` of an operand; 3-D operands carry heads in their last axis."""
    axes = chain.last
    if not flat:
        return list(axes)
    heads = g.int_attribute(anchor, "q_num_heads" if which == "q" else "kv_num_heads", 0)
    size = size_of(axes[2])
    depth = size.divided(Dim.of(heads)) if heads else None
    parts = None if depth is None else regroup([axes[2]], [Dim.of(heads), depth])
    if parts is None:
        raise Refused(
            "head_count",
            f"the last axis of {which} has length {size} and {heads} heads",
            anchor,
            "a 3-D Attention needs q_num_heads and kv_num_heads that divide its hidden size",
        )
    return [axes[0], parts[0], axes[1], parts[1]]


def _unify_operands(anchor: ir.Node, q: Axes, k: Axes, v: Axes, region: Region) -> None:
    q_heads, kv_heads = size_of(q[1]).static, size_of(k[1]).static
    grouped = q_heads is not None and kv_heads is not None and q_heads > kv_heads and q_heads % kv_heads == 0
    if grouped and q_heads is not None and kv_heads is not None:
        parts = regroup([q[1]], [Dim.of(kv_heads), Dim.of(q_heads // kv_heads)])
        fits = parts is not None and (kv_heads == 1 or unify(parts[0], k[1], region.shapes))
    else:
        fits = unify(q[1], k[1], region.shapes)
    pairs = ((q[0], k[0]), (q[0], v[0]), (k[1], v[1]), (k[2], v[2]), (q[3], k[3]))
    if not fits or not all(unify(a, b, region.shapes) for a, b in pairs):
        raise Refused(
            "operand_shapes",
            "query, key and value do not agree in batch, heads, length or head dim",
            anchor,
            "check the model with onnx's shape inference",
        )


def _scale(anchor: ir.Node, depth: list[Atom]) -> float:
    written = anchor.attributes.get("scale")
    if written is not None:
        return float(written.as_float())
    size = size_of(depth).static
    if not size:
        raise Refused("head_dim_dynamic", "the head dim is dynamic", anchor, "export with a static head dim")
    return 1.0 / math.sqrt(size)


def _is_causal(anchor: ir.Node, rows: list[Atom], columns: list[Atom], region: Region) -> bool:
    if not g.int_attribute(anchor, "is_causal", 0):
        return False
    square = region.shapes.normal(size_of(rows)) == region.shapes.normal(size_of(columns))
    if region.opset >= 25 and not square:
        raise Refused(
            "causal_alignment",
            f"opset {region.opset} words the alignment of is_causal for unequal lengths in its own way",
            anchor,
            "export at opset 23 or 24, or pass the mask as a tensor",
        )
    return True


def _mask(anchor: ir.Node, axes: Axes, region: Region) -> list[Term]:
    mask = g.input_of(anchor, 3)
    if mask is None:
        return []
    shape = region.shapes.shape(mask)
    if shape is None:
        raise Refused("rank_unknown", f'the rank of "{mask.name}" is not known', anchor, "run shape inference first")
    length = region.shapes.normal(size_of(axes[3]))
    if shape[-1].static is not None and length.static is not None and shape[-1] not in (length, ONE):
        raise Refused("mask_short", f"the mask's last dim is {shape[-1]}, the keys' {length}", anchor, "pad the mask")
    if region.shapes.dtype(mask) == ir.DataType.BOOL:
        return [Hidden(mask, True, float("-inf"), axes, anchor)]
    return [Added(mask, 1.0, axes, anchor)]
