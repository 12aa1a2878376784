# SPDX-License-Identifier: Apache-2.0
"""From the canonical form to a node: which layout, which values it reads, where it ends, what its bias is made of.

Every choice is between lists of atoms: a layout fits an operand when a value of its chain has exactly the axes that
the layout asks for. The cheapest choice wins, counted in the nodes it must add; layout 0 on a tie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from flash_export import graph as g
from flash_export.arrange import MOVE_COST, Move, arrange
from flash_export.canonical import Attention, Refused
from flash_export.drafts import is_draft
from flash_export.dtype_refusal import no_common_type
from flash_export.feeds import BiasFeed, Feed, Heads, bias_of, bias_shape_of, lengths_of, sinks_of
from flash_export.layout import Axes, Axis, Chain, leaves, size_of
from flash_export.masks import MaskPlan, plan_masks
from flash_export.odd_numbers import refuse_odd_numbers, refuse_odd_scale
from flash_export.op import (
    FLASH_ATTENTION,
    FLASH_ATTENTION_EX,
    FLASH_ATTENTION_PACKED,
    LAYOUT_BHSD,
    LAYOUT_BSHD,
    Attributes,
    Operator,
)
from flash_export.packed import packed
from flash_export.region import Region

MAX_HEAD_DIM = 256
"""The largest tile of ``plugin/kernels/variants.inc``; a contract test compares the two."""

DTYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
SPLIT_COST = 8.0
"""Layout 0 around the outputs of one Split: measured 35.4 MiB of activations against 24 with transposes in layout 1."""


MERGED_COST = 2.0
"""Batch and heads as one axis hide the heads from kernels and reports; only where nothing else fits."""

EXPANDED_COST = 1.0
"""A mask that is written for the whole batch; only where nothing else fits, and then of as few masks as can be."""

UNLIKELY_COST = 0.5
"""A reading that is less likely must save more than reshapes: it takes heads for the query length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One FlashAttention node: everything ``rewrite`` needs.

    ``operands`` are query, key and value, or the one packed tensor; ``also`` are other outputs of the anchor and the
    values that take their place.
    """

    anchor: ir.Node
    nodes: tuple[ir.Node, ...]
    operator: Operator
    attributes: Attributes
    operands: tuple[Feed, ...]
    biases: tuple[BiasFeed, ...]
    lengths: Feed | None
    sinks: Feed | None
    also: tuple[tuple[ir.Value, ir.Value], ...]
    dtype: ir.DataType
    output: ir.Value
    output_moves: tuple[Move, ...]
    head_dim: int
    v_head_dim: int
    bias_shape: list[int | str | None] | None

    @property
    def sources(self) -> list[ir.Value]:
        """The values that the new node depends on."""
        feeds = [f for f in (*self.operands, *(f for b in self.biases for f in b.feeds), self.lengths, self.sinks) if f]
        moves = [*(move for f in feeds for move in f.moves), *self.output_moves]
        lengths = [value for move in moves for _, sources in move.lengths for value, _, _ in sources]
        return list(dict.fromkeys([*(f.value for f in feeds), *lengths]))

    @property
    def replaced(self) -> dict[ir.Value, list[ir.Value]]:
        """The values that the rewrite replaces, and what each then depends on."""
        return {self.output: self.sources} | {old: [new] for old, new in self.also}


def make_plan(attention: Attention, region: Region) -> Plan:
    """The cheapest node that computes ``attention``.

    Raises:
        Refused: no layout fits, a size that must be fixed is dynamic, or a mask cannot be handed over.
    """
    best: tuple[float, Plan] | None = None
    refusal: Refused | None = None
    for index, (batch, rows) in enumerate([(attention.batch, attention.rows), *attention.readings]):
        try:
            cost, plan = _cheapest(dataclasses.replace(attention, batch=batch, rows=rows), region)
        except Refused as error:
            refusal = refusal or error
            continue
        cost += index * UNLIKELY_COST
        if best is None or cost < best[0] - 1e-9:
            best = cost, plan
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def _cheapest(attention: Attention, region: Region) -> tuple[float, Plan]:
    """The plan with its cost.

    Raises:
        Refused: as ``make_plan``.
    """
    head_dim = _static(attention, attention.depth, "head_dim_dynamic", "the head dim")
    v_head_dim = _static(attention, attention.v_depth, "head_dim_dynamic", "V's head dim")
    refuse_odd_numbers(attention)
    masks = plan_masks(attention, region)
    best: tuple[float, Plan] | None = None
    refusal: Refused | None = None
    depths = head_dim, v_head_dim
    for expand in (False, True) if masks.parts else (False,):
        for dtype in _dtypes(attention, region):
            mark, choice = region.drafts.mark(), None
            for heads in _partitions(attention):
                for layout in (LAYOUT_BSHD, LAYOUT_BHSD):
                    try:
                        candidate = _candidate(attention, masks, heads, layout, dtype, depths, region, expand=expand)
                    except Refused as error:
                        refusal = refusal if expand else error
                        continue
                    if candidate is not None and (best is None or candidate[0] < best[0] - 1e-9):
                        best, choice = candidate, (heads, layout)
            if expand:  # the drafts of what was not chosen would read the graph's values
                region.drafts.discard(mark)
                if choice is not None:
                    best = _candidate(attention, masks, *choice, dtype, depths, region, expand=True)
            if best is not None:
                return best
    raise refusal or Refused(
        "layout",
        "Q, K, V and the output fit neither [B, S, H*D] nor [B, H, S, D] without computing shapes at run time",
        attention.anchor,
        "bring Q, K and V to the product by view(B, S, H, D) and transpose(1, 2) alone, or export with fixed sizes",
    )


def _static(attention: Attention, axis: Axis, code: str, what: str) -> int:
    size = size_of(axis).static
    if size is None or size < 1:
        raise Refused(code, f"{what} is {size_of(axis)}", attention.anchor, "export with a static head dim")
    if size > MAX_HEAD_DIM:
        raise Refused(
            "head_dim_large",
            f"{what} is {size}; the kernels take up to {MAX_HEAD_DIM}",
            attention.anchor,
            "leave it in standard operators, or add a line to plugin/kernels/variants.inc",
        )
    return size


def _dtypes(attention: Attention, region: Region) -> list[ir.DataType]:
    """The element types the node may have, the cheapest first.

    Q, K and V must all be available in the type and the result must end in it, so that a graph that computes the
    scores in fp32 between two Casts becomes one fp16 node, and a graph that goes on in fp32 stays in fp32.
    """
    operands = [{region.shapes.dtype(v) for v in c.values} for c in (attention.query, attention.key, attention.value)]
    ends = {region.shapes.dtype(t.value) for t in attention.tails}
    fitting = [d for d in DTYPES if all(d in s for s in operands) and d in ends]
    if not fitting:
        raise no_common_type(attention, region.shapes)
    return fitting


def _partitions(attention: Attention) -> Iterator[Heads]:
    """Every split of the scores' outer axes into batch and heads in which K and V miss only the innermost heads."""
    outer = leaves(attention.batch)
    if _absent(attention.query, outer):
        raise Refused(
            "query_broadcast",
            "Q is broadcast along a batch or head axis",
            attention.anchor,
            "expand Q before the product",
        )
    shared = _missing(attention.key, outer) & _missing(attention.value, outer)
    absent = _absent(attention.key, outer) | _absent(attention.value, outer)
    found = False
    for count in range(len(outer), -1, -1):
        batch, heads = outer[:count], outer[count:]
        if any(a.size.static is None for a in heads):
            continue
        for gone in (shared, set()):
            kv = [a for a in heads if id(a) not in gone]
            suffix = heads[: len(kv)] == kv
            if suffix and absent <= gone and not any(id(a) in gone for a in batch):
                found = True
                yield Heads(batch, heads, kv)
            if not shared:
                break
    if not found:
        raise Refused(
            "operand_shapes",
            "K or V is broadcast along the batch, or along heads that are not the innermost",
            attention.anchor,
            "expand K and V before the product, or give both the heads that they share as their innermost",
        )


def _missing(chain: Chain, outer: Axis) -> set[int]:
    held = {id(a) for a in chain.data_atoms()}
    return {id(a) for a in outer if id(a) not in held}


def _absent(chain: Chain, outer: Axis) -> set[int]:
    held = {id(a) for axis in chain.last for a in leaves(axis)}
    return {id(a) for a in outer if id(a) not in held}


def _wanted(layout: int, batch: Axis, heads: Axis, length: Axis, depth: Axis) -> Axes:
    return [batch, length, heads + depth] if layout == LAYOUT_BSHD else [batch, heads, length, depth]


def _candidate(
    attention: Attention,
    masks: MaskPlan,
    heads: Heads,
    layout: int,
    dtype: ir.DataType,
    depths: tuple[int, int],
    region: Region,
    *,
    expand: bool,
) -> tuple[float, Plan] | None:
    rows, columns = leaves(attention.rows), leaves(attention.columns)
    wanted = (
        _wanted(layout, heads.batch, heads.heads, rows, leaves(attention.depth)),
        _wanted(layout, heads.batch, heads.kv_heads, columns, leaves(attention.depth)),
        _wanted(layout, heads.batch, heads.kv_heads, columns, leaves(attention.v_depth)),
    )
    chains = (attention.query, attention.key, attention.value)
    feeds = [_feed(c, w, dtype, region) for c, w in zip(chains, wanted, strict=True)]
    end = _end(attention, _wanted(layout, heads.batch, heads.heads, rows, leaves(attention.v_depth)), dtype, region)
    if end is None or any(f is None for f in feeds):
        return None
    operands = [f for f in feeds if f is not None]
    sources = chains if expand else ()
    biases = tuple(bias_of(part, heads, rows, columns, dtype, region, sources) for part in masks.parts)
    sides = (lengths_of(masks.lengths, heads, region), sinks_of(attention, heads, region))
    operator = FLASH_ATTENTION_EX if biases or any(sides) else FLASH_ATTENTION
    cost = sum(f[1] for f in operands)
    factor = operands[0][0].factor * operands[1][0].factor
    if layout == LAYOUT_BSHD and _is_split(*(f for f, _ in operands)):
        cost += SPLIT_COST
    if layout == LAYOUT_BSHD and operator is FLASH_ATTENTION:
        one = _packed_feed(chains, wanted, heads, rows, dtype, region)
        if one is not None and one[1] < cost:
            operands, cost, operator = [one], one[1], FLASH_ATTENTION_PACKED
    if len(heads.batch) > 1:
        cost += MERGED_COST
    cost += EXPANDED_COST * sum(is_draft(feed.value) for bias in biases for feed in bias.feeds) if expand else 0.0
    plan = Plan(
        anchor=attention.anchor,
        nodes=tuple(attention.nodes),
        operator=operator,
        attributes=_attributes(attention, masks, heads, layout, factor, (bool(biases), bool(sides[0]), bool(sides[1]))),
        operands=tuple(f for f, _ in operands),
        biases=biases,
        lengths=sides[0],
        sinks=sides[1],
        also=tuple(attention.also),
        dtype=dtype,
        output=end[0],
        output_moves=tuple(end[1]),
        head_dim=depths[0],
        v_head_dim=depths[1],
        bias_shape=bias_shape_of(biases, region),
    )
    return cost + end[2], plan


def _packed_feed(
    chains: tuple[Chain, Chain, Chain],
    wanted: tuple[Axes, Axes, Axes],
    heads: Heads,
    rows: Axis,
    dtype: ir.DataType,
    region: Region,
) -> tuple[Feed, float] | None:
    """The packed tensor that Q, K and V are parts of, where there is one for the operator's packed form."""
    if size_of(wanted[1][2]) != size_of(wanted[2][2]):
        return None
    found = packed(chains, (wanted[0][2], wanted[1][2], wanted[2][2]), heads.batch, rows, region.shapes)
    if found is None or any(leaves(w[1]) != leaves(rows) for w in wanted):
        return None
    fed = _feed(found.chain, found.wanted, dtype, region)
    if fed is None:
        return None
    feed, cost = fed
    path = (*feed.path, *found.nodes, *(n for chain in chains for n in chain.nodes))
    return Feed(feed.value, feed.moves, 1.0, tuple(dict.fromkeys(path))), cost


def _attributes(
    attention: Attention, masks: MaskPlan, heads: Heads, layout: int, factor: float, sides: tuple[bool, bool, bool]
) -> Attributes:
    band = masks.band
    causal = band is not None and band.right == 0
    refuse_odd_scale(attention.scale * factor, attention)
    q_heads, kv_heads = size_of(heads.heads).static, size_of(heads.kv_heads).static
    assert q_heads is not None
    assert kv_heads is not None
    try:
        return Attributes(
            q_num_heads=q_heads,
            kv_num_heads=kv_heads,
            scale=attention.scale * factor,
            layout=layout,
            softcap=attention.softcap,
            causal=int(causal),
            diagonal=int(band is not None and band.bottom_right),
            window_left=-1 if band is None or band.left is None else band.left,
            window_right=-1 if band is None or band.right is None or causal else band.right,
            has_bias=int(sides[0]),
            has_kv_lengths=int(sides[1]),
            has_sinks=int(sides[2]),
        )
    except ValueError as error:
        raise Refused("attribute_range", str(error), attention.anchor, "leave it in standard operators") from error


def _feed(chain: Chain, wanted: Axes, dtype: ir.DataType, region: Region) -> tuple[Feed, float] | None:
    """The cheapest value of the chain for the wanted axes, the topmost among equals."""
    best: tuple[Feed, float] | None = None
    for index, value in enumerate(chain.values):
        if region.shapes.dtype(value) != dtype:
            continue
        moves = arrange(chain.axes[index], wanted)
        if moves is None:
            continue
        cost = sum(MOVE_COST[m.op] for m in moves) + _remaining(chain.nodes[:index])
        if best is None or cost < best[1] - 1e-9:
            best = Feed(value, tuple(moves), chain.factor_below(index), tuple(chain.nodes[index:])), cost
    return best


def _end(
    attention: Attention, produced: Axes, dtype: ir.DataType, region: Region
) -> tuple[ir.Value, list[Move], float] | None:
    """Where the node's result replaces a value: the lowest that costs least."""
    best: tuple[ir.Value, list[Move], float] | None = None
    below = [t.value.producer() for t in attention.tails]
    for index, tail in enumerate(attention.tails):
        if region.shapes.dtype(tail.value) != dtype:
            continue
        moves = arrange(produced, tail.axes)
        if moves is None:
            continue
        cost = sum(MOVE_COST[m.op] for m in moves) + _remaining(n for n in below[index + 1 :] if n is not None)
        if best is None or cost <= best[2] + 1e-9:
            best = tail.value, moves, cost
    return best


def _remaining(nodes: Iterable[ir.Node]) -> float:
    """What the layout nodes cost that stay in the graph around a choice."""
    return sum(MOVE_COST.get(n.op_type, 0.3) for n in nodes)


def _is_split(*feeds: Feed) -> bool:
    """Whether Q, K and V are slices of one packed projection."""
    sources = []
    for feed in feeds:
        node = feed.value.producer()
        if not g.is_op(node, "Split", "Slice"):
            return False
        assert node is not None
        sources.append(node.inputs[0])
    return len(set(sources)) == 1
