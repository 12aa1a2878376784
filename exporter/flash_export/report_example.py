# SPDX-License-Identifier: Apache-2.0
"""One fused attention for people to look at: its nodes before and after, and the memory it takes as lengths grow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from flash_export import dim_ranges, twin
from flash_export.cut import CannotCut, cut
from flash_export.dims import Shape
from flash_export.graph import constant
from flash_export.inputs import MAX_DIM
from flash_export.op import FLASH_ATTENTION_PACKED, LAYOUT_BHSD, OPERATORS
from flash_export.score_probe import flash_node
from flash_export.shapes import Shapes
from flash_export.sites import Site

LENGTHS = tuple(2**i for i in range(7, 15))
"""128 to 16,384, as far as a model goes: below, attention takes little memory however it is computed."""

_FLOAT32_BYTES = 4
SIZE_OPERANDS = {
    "ConstantOfShape": 0, "Expand": 1, "Range": 0, "Reshape": 1, "Resize": 1, "Slice": 1, "Split": 1, "Squeeze": 1,
    "Tile": 1, "TopK": 1, "Trilu": 1, "Unsqueeze": 1,
}  # fmt: skip
"""Operator -> the first of its operands that are sizes, axes or offsets; no data of the model passes those."""


@dataclasses.dataclass(frozen=True, slots=True)
class Before:
    """The site that is shown and its graph as it was. Made before the rewrite, since the rewrite changes the model."""

    site: Site
    graph: ir.Model


def look_before(model: ir.Model, sites: Sequence[Site]) -> Before | None:
    """The first fused site that can be cut out of ``model``; None where there is none."""
    for site in sites:
        if site.status == "fused" and site.boundary:
            try:
                return Before(site, cut(model, site.boundary, [site.output]))
            except CannotCut:
                continue
    return None


def as_json(before: Before | None, fused: ir.Model) -> dict[str, object] | None:
    """The ``example`` entry of ``report.json``; None where there is nothing to show.

    Args:
        before: what ``look_before`` found.
        fused: the whole model after the rewrite.
    """
    if before is None:
        return None
    site = before.site
    try:
        after = cut(fused, site.boundary, [site.output])
    except CannotCut:  # no reason to fail: the check says what it could not cut
        return None
    values = ir.convenience.create_value_mapping(fused.graph, include_subgraphs=False)
    node, shapes = flash_node(values.get(site.output)), Shapes(fused.graph)
    end = longest(site, node, shapes, dim_ranges.parse(fused.metadata_props.get(dim_ranges.PROPERTY, "{}")))
    return {
        "site": site.name,
        "before": describe(before.graph),
        "after": describe(after),
        "memory": memory(site, before.graph, end, bias_width(site, node, shapes)),
    }


def longest(site: Site, node: ir.Node | None, shapes: Shapes, ranges: dim_ranges.Ranges) -> int | None:
    """The longest queries or keys that the site's ``node`` takes; None where nothing limits one of them."""
    if node is None or site.attributes is None:
        return None
    axis = 2 if site.attributes.layout == LAYOUT_BHSD else 1
    ends = [_end(shapes.shape(value), axis, ranges) for value in node.inputs[: 1 if _is_packed(node) else 2]]
    known = [end for end in ends if end is not None]
    return max(known) if len(known) == len(ends) else None


def bias_width(site: Site, node: ir.Node | None, shapes: Shapes) -> int:
    """Bytes of one number of the bias that the site's ``node`` reads; 0 where it reads none."""
    if node is None or site.attributes is None or not site.attributes.has_bias:
        return 0
    return _bytes_of(shapes.dtype(node.inputs[OPERATORS[node.op_type].inputs.index("bias")]))


def _is_packed(node: ir.Node) -> bool:
    return node.op_type == FLASH_ATTENTION_PACKED.name


def _end(shape: Shape | None, axis: int, ranges: dim_ranges.Ranges) -> int | None:
    dim = None if shape is None or axis >= len(shape) else shape[axis]
    highs = {name: ranges.get(name, (0, MAX_DIM))[1] for name in (dim.symbols if dim else ())}
    if dim is None or MAX_DIM in highs.values() or min(dim.terms.values(), default=0) < 0:
        return None
    return dim.evaluate(highs)


def describe(part: ir.Model) -> dict[str, object]:
    """A small graph as data: its inputs, its output, its one-element constants as text, and its nodes in order.

    A node with ``"sizes": true`` computes constants, shapes and offsets, so no data of the model passes it.
    """
    graph = part.graph
    sizes = _size_nodes(graph)
    nodes = [
        {
            "name": node.name or "",
            "op": f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
            "inputs": [value.name if value is not None else "" for value in node.inputs],
            "outputs": [value.name for value in node.outputs],
            "sizes": node in sizes,
        }
        for node in graph
    ]
    constants = [*graph.initializers.values(), *(out for node in graph if not node.inputs for out in node.outputs)]
    scalars = {value.name: _scalar_text(value) for value in constants}
    return {
        "inputs": [value.name for value in graph.inputs],
        "output": graph.outputs[0].name,
        "scalars": {name: text for name, text in scalars.items() if text},
        "nodes": nodes,
    }


def _size_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Nodes that are computed from constants and shapes alone, or that are read as sizes only."""
    known: set[ir.Value | None] = {None, *graph.initializers.values()}
    found: set[ir.Node] = set()
    for node in graph:
        if node.op_type in ("Shape", "Size") or all(value in known for value in node.inputs):
            known.update(node.outputs)
            found.add(node)
    for node in reversed(graph):
        uses = [use for value in node.outputs for use in value.uses()]
        if uses and all(u.node in found or u.idx >= SIZE_OPERANDS.get(u.node.op_type, u.idx + 1) for u in uses):
            found.add(node)
    return found


def _scalar_text(value: ir.Value) -> str:
    """The number of a one-element constant, as text since JSON has no infinity; empty for anything else."""
    array = constant(value)
    if array is None or array.size != 1 or not (twin.is_float(array.dtype) or array.dtype.kind in "iub"):
        return ""
    return f"{float(array.reshape(())):.6g}"


def memory(site: Site, part: ir.Model, end: int | None = None, bias_bytes: int = 0) -> dict[str, object] | None:
    """Bytes that one attention holds at a time, batch 1, as many queries as keys, unfused and fused.

    Both hold query, key, value and output. Unfused, the softmax also reads all scores [Hq, S, S] and writes all
    probabilities; what is added to the scores is in them by then. Fused, the node reads its bias. Arithmetic from the
    shapes, for runtimes that run the nodes as they stand; no measurement.

    Args:
        bias_bytes: of one number of the bias; 0 where the node reads none.
        end: the longest length of the model; None where nothing limits it. With less than two lengths there is no line.
    """
    a, lengths = site.attributes, _lengths(end)
    if a is None or site.head_dim is None or len(lengths) < 2:
        return None
    v_head_dim = site.v_head_dim or site.head_dim
    twin.infer_types(part)
    width = _bytes_of(part.graph.outputs[0].dtype)
    probs = [node.outputs[0] for node in part.graph if node.op_type == "Softmax"]
    scores_width = max((_bytes_of(value.dtype) for value in probs), default=width)
    row_bytes = (a.q_num_heads + a.kv_num_heads) * (site.head_dim + v_head_dim) * width
    return {
        "batch": 1,
        "lengths": lengths,
        "unfused_bytes": [s * row_bytes + 2 * a.q_num_heads * s * s * scores_width for s in lengths],
        "fused_bytes": [s * row_bytes + _bias_numbers(site, s) * bias_bytes for s in lengths],
    }


def _bias_numbers(site: Site, length: int) -> int:
    """How many numbers the bias has for one batch entry: each dim is 1 or that of the scores [B, Hq, S, S]."""
    if site.bias_shape is None or site.attributes is None:
        return 0  # it has none, or its shape is not known
    full = (length, length, site.attributes.q_num_heads)
    return math.prod(size for dim, size in zip(reversed(site.bias_shape), full, strict=False) if dim != 1)


def _lengths(end: int | None) -> list[int]:
    """``LENGTHS`` as far as the model goes, and its own longest; eighths of that where it ends before them."""
    if end is None or end >= LENGTHS[-1]:
        return list(LENGTHS)
    first = LENGTHS if end > LENGTHS[0] else [end // 8, end // 4, end // 2]
    return [*(length for length in first if 0 < length < end), *([end] if end > 0 else [])]


def _bytes_of(dtype: ir.DataType | None) -> int:
    """Bytes of one number; those of float32 where the file does not tell the type."""
    return _FLOAT32_BYTES if dtype is None else max(1, int(dtype.bitwidth) // 8)
