# SPDX-License-Identifier: Apache-2.0
"""What every operator that is attention as a whole has in common: heads, caches, the scale, the canonical form."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from flash_export import graph as g
from flash_export.bands import Band
from flash_export.canonical import Added, Attention, Hidden, Refused, Side, Term
from flash_export.dims import Dim
from flash_export.layout import Atom, Axes, Chain, leaves, regroup, size_of, unify
from flash_export.patterns.quantized import refuse_quantized
from flash_export.region import Region, follow_tail


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """An attention operator's operands and settings, each as attention reads it.

    ``query``, ``key`` and ``value`` are ``[B, S, H*D]`` or ``[B, H, S, D]``, each by itself. ``masks`` broadcast to
    ``[B, Hq, Sq, Skv]``: boolean ones hide with minus infinity where they are False, the others are added. ``also``
    are further outputs of the anchor and the values that take their place. ``flat``: the output is ``[B, S, H*Dv]``
    whatever the query is.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    heads: int
    kv_heads: int
    scale: float | None = None
    softcap: float = 0.0
    masks: tuple[ir.Value, ...] = ()
    band: Band | None = None
    flat: bool = False
    lengths: ir.Value | None = None
    sinks: ir.Value | None = None
    also: tuple[tuple[ir.Value, ir.Value], ...] = ()


def attention_of(anchor: ir.Node, operator: Operator, region: Region) -> Attention:
    """The canonical form of an operator.

    Raises:
        Refused: the operands do not fit one another, or are dequantized right before the operator.
    """
    refuse_quantized((operator.query, operator.key, operator.value), anchor)
    query, key, value = (
        region.operand(v, anchor, scalars=i < 2) for i, v in enumerate((operator.query, operator.key, operator.value))
    )
    counts = (operator.heads, operator.kv_heads, operator.kv_heads)
    q_axes, k_axes, v_axes = (
        _heads_apart(anchor, c, n, name) for c, n, name in zip((query, key, value), counts, "qkv", strict=True)
    )
    _unify_operands(anchor, q_axes, k_axes, v_axes, region)
    batch, heads, rows, depth = (leaves(a) for a in q_axes)
    columns, v_depth = leaves(k_axes[2]), leaves(v_axes[3])
    flat = operator.flat or len(query.last) == 3
    result: Axes = [batch, rows, heads + v_depth] if flat else [batch, heads, rows, v_depth]
    scores: Axes = [batch, heads, rows, columns]
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
        scale=_default_scale(anchor, depth) if operator.scale is None else operator.scale,
        softcap=operator.softcap,
        terms=[_term(anchor, mask, scores, region) for mask in operator.masks],
        tails=follow_tail(anchor.outputs[0], result, region.shapes),
        band=operator.band,
        nodes=[anchor],
        lengths=None if operator.lengths is None else Side(operator.lengths, [batch], anchor),
        sinks=None if operator.sinks is None else Side(operator.sinks, [heads], anchor),
        also=list(operator.also),
    )


def _term(anchor: ir.Node, mask: ir.Value, axes: Axes, region: Region) -> Term:
    shape = region.shapes.shape(mask)
    if shape is None:
        raise Refused("rank_unknown", f'the rank of "{mask.name}" is not known', anchor, "run shape inference first")
    length, last = region.shapes.normal(size_of(axes[3])).static, shape[-1].static
    if last is not None and length is not None and last not in (length, 1):
        raise Refused("mask_short", f"the mask's last dim is {last}, the keys' {length}", anchor, "pad the mask")
    if region.shapes.dtype(mask) == ir.DataType.BOOL:
        return Hidden(mask, True, float("-inf"), axes, anchor)
    return Added(mask, 1.0, axes, anchor)


def is_used(value: ir.Value) -> bool:
    """Whether anybody reads an output."""
    return value.is_graph_output() or bool(value.uses())


def float_of(anchor: ir.Node, name: str, default: float) -> float:
    """A FLOAT attribute, or ``default`` where it is not written."""
    attribute = anchor.attributes.get(name)
    return default if attribute is None else float(attribute.as_float())


def refuse_scores(anchor: ir.Node, index: int) -> None:
    """Refuses an operator whose output ``index`` (or a later one) is read: the scores or the probabilities."""
    for value in anchor.outputs[index:]:
        if is_used(value):
            raise Refused(
                "probabilities_used",
                f'the scores "{value.name}" are an output; FlashAttention never forms them',
                anchor,
                "export the model without its attention weights",
            )


SEPARATE = "export with past and present as tensors of their own, as optimum does, not as one buffer that is shared"
"""What to do where an operator writes into a cache that it is given."""


def refuse_inputs(anchor: ir.Node, names: dict[int, str], code: str, action: str) -> None:
    """Refuses an operator that is given one of these inputs."""
    for index, name in names.items():
        if g.input_of(anchor, index) is not None:
            raise Refused(
                code,
                f"{anchor.op_type} is given {name}, which has no counterpart in standard operators here",
                anchor,
                action,
            )


def heads_first(anchor: ir.Node, value: ir.Value, heads: int, which: str, region: Region) -> ir.Value:
    """``[B, H, S, D]`` of an operand ``[B, S, H*D]``, written down; one of rank 4 is that already."""
    shape = region.shapes.shape(value)
    if shape is not None and len(shape) == 4:
        return value
    depth = None if shape is None or not heads else shape[-1].divided(Dim.of(heads))
    if depth is None or depth.static is None:
        raise _uneven(anchor, which, str(shape), heads)
    apart = region.drafts.reshape(value, 0, 0, heads, depth.static)
    return region.drafts.op("Transpose", apart, perm=[0, 2, 1, 3])


def behind(past: ir.Value | None, value: ir.Value, region: Region) -> ir.Value:
    """``value`` of rank 4 behind the past, as a value of its own that may become an output."""
    drafts = region.drafts
    return drafts.op("Identity", value) if past is None else drafts.op("Concat", past, value, axis=2)


def _heads_apart(anchor: ir.Node, chain: Chain, heads: int, which: str) -> Axes:
    """``[batch], [heads], [length], [head dim]`` of an operand; 3-D operands carry heads in their last axis."""
    axes = chain.last
    if len(axes) != 3:
        return list(axes)
    size = size_of(axes[2])
    depth = size.divided(Dim.of(heads)) if heads else None
    parts = None if depth is None else regroup([axes[2]], [Dim.of(heads), depth])
    if parts is None:
        raise _uneven(anchor, which, str(size), heads)
    return [axes[0], parts[0], axes[1], parts[1]]


def _uneven(anchor: ir.Node, which: str, size: str, heads: int) -> Refused:
    return Refused(
        "head_count",
        f"the last axis of {which} has length {size} and {heads} heads",
        anchor,
        "an operand of rank 3 needs a number of heads that divides its hidden size",
    )


def _unify_operands(anchor: ir.Node, q: Axes, k: Axes, v: Axes, region: Region) -> None:
    q_heads, kv_heads = size_of(q[1]).static, size_of(k[1]).static
    grouped = q_heads is not None and kv_heads is not None and 0 < kv_heads < q_heads and q_heads % kv_heads == 0
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


def _default_scale(anchor: ir.Node, depth: list[Atom]) -> float:
    size = size_of(depth).static
    if not size:
        raise Refused("head_dim_dynamic", "the head dim is dynamic", anchor, "export with a static head dim")
    return 1.0 / math.sqrt(size)
