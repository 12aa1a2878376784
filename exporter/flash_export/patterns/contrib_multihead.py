# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's ``com.microsoft.MultiHeadAttention``: packed or not, with and without a cache.

Text and CPU kernel of ONNX Runtime 1.32: ``mask_filter_value`` is added where the key padding mask is 0, or from a
length on; ``unidirectional`` hides later keys altogether where it is 1, but never from the last query.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.bands import Band
from flash_export.canonical import Attention, Refused
from flash_export.dims import Dim
from flash_export.patterns.contrib_inputs import require_inputs
from flash_export.patterns.operator import (
    SEPARATE,
    Operator,
    attention_of,
    behind,
    float_of,
    heads_first,
    is_used,
    refuse_inputs,
    refuse_scores,
)
from flash_export.region import Region


def read(anchor: ir.Node, region: Region) -> Attention:
    """The attention that a ``MultiHeadAttention`` node computes.

    Raises:
        Refused: its buffers are shared, its probabilities are an output, or a mask has a form that is not known.
    """
    require_inputs(anchor, region)
    refuse_scores(anchor, 3)
    refuse_inputs(anchor, {8: "past_sequence_length", 9: "cache_indirection"}, "cache_in_place", SEPARATE)
    heads = g.int_attribute(anchor, "num_heads", 0)
    operands = _operands(anchor, heads, region)
    query, new_key = operands[0], operands[1]
    present = [_present(anchor, i, v, heads, region) for i, v in enumerate(operands[1:], start=1)]
    causal = g.int_attribute(anchor, "unidirectional", 0) == 1
    masks = key_padding(anchor, 4, query, present[0], region)
    bias = g.input_of(anchor, 5)
    operator = Operator(
        query,
        present[0],
        present[1],
        heads,
        heads,
        scale=float_of(anchor, "scale", 0.0) or None,
        masks=masks if bias is None else (*masks, bias),
        band=band_behind(anchor, causal, query, new_key, g.input_of(anchor, 6), region),
        flat=True,
        also=tuple((v, p) for v, p in zip(anchor.outputs[1:3], present, strict=False) if is_used(v)),
    )
    return attention_of(anchor, operator, region)


def length_of(value: ir.Value, region: Region) -> Dim:
    """The sequence length of ``[B, S, H*D]`` or ``[B, H, S, D]``."""
    shape = region.shapes.shape(value)
    return region.shapes.fresh() if shape is None or len(shape) < 3 else region.shapes.normal(shape[-2])


def band_behind(
    anchor: ir.Node, causal: bool, query: ir.Value, new_key: ir.Value, past: ir.Value | None, region: Region
) -> Band | None:
    """Causal from the top left, or from the bottom right behind a past that is followed by as many keys as queries.

    The kernel shows the last query all keys: between more keys than queries that is no corner.
    """
    if not causal:
        return None
    rows, keys = length_of(query, region), length_of(new_key, region)
    fewer = None not in (rows.static, keys.static) and keys.static <= rows.static  # type: ignore[operator]
    if rows != keys and not (past is None and fewer):
        where = "meet, and the last query sees all keys" if past is None else "follow the cache"
        raise Refused(
            "causal_alignment", f"{keys} keys and {rows} queries {where}", anchor, "pass the mask as a tensor"
        )
    return Band(None, 0, past is not None, False)


def key_padding(anchor: ir.Node, index: int, query: ir.Value, key: ir.Value, region: Region) -> tuple[ir.Value, ...]:
    """What the key padding mask at input ``index`` adds to the scores; it may be lengths ``[B]``."""
    mask = g.input_of(anchor, index)
    if mask is None:
        return ()
    shape, of_query = region.shapes.shape(mask), region.shapes.shape(query)
    if shape is not None and of_query is not None and len(shape) == 1:
        if region.shapes.normal(shape[0]) == region.shapes.normal(of_query[0]):
            return (_filled(anchor, _below(mask, key, region), 2, query, region),)
    elif shape is not None and len(shape) in (2, 3) and _may_be(shape[-1], length_of(key, region), region):
        none = region.drafts.constant(np.zeros((), dtype=(region.shapes.dtype(mask) or ir.DataType.INT32).numpy()))
        return (_filled(anchor, region.drafts.op("Greater", mask, none), len(shape), query, region),)
    raise Refused(
        "bias_shape",
        f'"{mask.name}" has shape {None if shape is None else list(shape)}: not [B], [B, Skv] or [B, Sq, Skv] for sure',
        anchor,
        "give the mask as attention_bias, or state the shapes of the graph's inputs",
    )


def _may_be(length: Dim, other: Dim, region: Region) -> bool:
    """Two dynamic lengths that meet are taken to be equal."""
    known = region.shapes.normal(length), region.shapes.normal(other)
    return known[0] == known[1] or None in (known[0].static, known[1].static)


def _below(lengths: ir.Value, key: ir.Value, region: Region) -> ir.Value:
    """``[B, Skv]``: True for the first ``lengths`` keys."""
    drafts = region.drafts
    rank = len(region.shapes.shape(key) or ())
    index, zero, one = (drafts.constant(np.array(n, dtype=np.int64)) for n in (rank - 2, 0, 1))
    count = drafts.op("Gather", drafts.op("Shape", key), index, axis=0)
    wide = drafts.unsqueeze(drafts.op("Cast", lengths, to=int(ir.DataType.INT64)), 1)
    return drafts.op("Less", drafts.op("Range", zero, count, one), wide)


def _filled(anchor: ir.Node, seen: ir.Value, rank: int, query: ir.Value, region: Region) -> ir.Value:
    """``[B, 1, 1 or Sq, Skv]``: 0 where a key is seen, else ``mask_filter_value``, in the query's type."""
    drafts = region.drafts
    wide = drafts.unsqueeze(seen, *((1, 2) if rank == 2 else (1,)))
    dtype = region.shapes.dtype(query) or ir.DataType.FLOAT
    zero = drafts.constant(np.zeros((), dtype=dtype.numpy()))
    fill = drafts.constant(np.array(float_of(anchor, "mask_filter_value", -10000.0), dtype=dtype.numpy()))
    return drafts.op("Where", wide, zero, fill)


def _operands(anchor: ir.Node, heads: int, region: Region) -> list[ir.Value]:
    """Query, key and value, unpacked and with their biases."""
    drafts = region.drafts
    query, key, value = (g.input_of(anchor, i) for i in range(3))
    assert query is not None
    ranks = [None if shape is None else len(shape) for shape in map(region.shapes.shape, (query, key))]
    if key is None and ranks[0] == 5:
        operands = [_unpacked(query, i, region) for i in range(3)]
    elif key is not None and value is None and ranks == [3, 5]:
        operands = [query, *(_unpacked(key, i, region) for i in range(2))]
    elif key is not None and value is not None and ranks[0] != 5 != ranks[1]:
        operands = [query, key, value]
    else:
        raise Refused(
            "operand_shapes",
            f"key and value beside a query of rank {ranks[0]} are missing, or not packed alike",
            anchor,
            "check the model in ONNX Runtime",
        )
    bias = g.input_of(anchor, 3)
    if bias is None:
        return operands
    result, start = [], 0
    for operand, which in zip(operands, "qkv", strict=True):
        axes = region.shapes.shape(operand)
        width = None if axes is None or len(axes) != 3 else axes[2].static
        if width is None:
            raise Refused("head_dim_dynamic", f"a bias is added to {which} of unknown size", anchor, "leave it")
        result.append(drafts.op("Add", operand, drafts.slice(bias, 0, start, start + width)))
        start += width
    return result


def _unpacked(packed: ir.Value, index: int, region: Region) -> ir.Value:
    """Part ``index`` of ``[B, S, H, parts, D]`` as ``[B, H, S, D]``."""
    drafts = region.drafts
    part = drafts.squeeze(drafts.slice(packed, 3, index, index + 1), 3)
    return drafts.op("Transpose", part, perm=[0, 2, 1, 3])


def _present(anchor: ir.Node, index: int, value: ir.Value, heads: int, region: Region) -> ir.Value:
    """Key (1) or value (2) behind its past; itself where there is no cache."""
    past = g.input_of(anchor, index + 5)
    if past is None and not (len(anchor.outputs) > index and is_used(anchor.outputs[index])):
        return value
    return behind(past, heads_first(anchor, value, heads, "qkv"[index], region), region)
