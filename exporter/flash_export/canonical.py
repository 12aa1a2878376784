# SPDX-License-Identifier: Apache-2.0
"""The one expression that every attention is read into, and how a reading ends without one.

    output = softmax(cap(scale * Q.K^T) + sum of terms) . V

Patterns (``patterns/``) build an ``Attention``; ``plan`` turns it into a node. Nothing in it depends on which
operators the graph used.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from flash_export.bands import Band
from flash_export.layout import Axes, Axis, Chain
from flash_export.sites import Refusal


class Refused(Exception):
    """The site is attention, or looks like it, and must stay as it is."""

    def __init__(self, code: str, text: str, node: ir.Node | None, action: str) -> None:
        super().__init__(text)
        self.reason = Refusal(code, text, name_of(node), action)


class NotAttention(Exception):
    """The softmax weighs something else: a classifier head, a gate, a pooling."""


class NoAnchor(Exception):
    """The node is of an operator that softmaxes are written with, and makes none."""


def name_of(node: ir.Node | None) -> str:
    """The node's name, or its first output's where it has none."""
    if node is None:
        return ""
    return node.name or (str(node.outputs[0].name) if node.outputs else node.op_type)


@dataclasses.dataclass(slots=True)
class Added:
    """``factor * value`` is added to the scores, whose axes there are ``axes``."""

    value: ir.Value
    factor: float
    axes: Axes
    node: ir.Node


@dataclasses.dataclass(slots=True)
class Hidden:
    """Scores whose ``condition`` differs from ``keep`` become ``fill``: minus infinity, or a type's lowest number."""

    condition: ir.Value
    keep: bool
    fill: float
    axes: Axes
    node: ir.Node


Term = Added | Hidden


@dataclasses.dataclass(slots=True)
class Side:
    """A side input of the node, a tensor with these axes: one number a head (sinks) or a batch entry (lengths)."""

    value: ir.Value
    axes: Axes
    node: ir.Node


@dataclasses.dataclass(slots=True)
class Tail:
    """A value below the second product and its axes: where the fused node may end."""

    value: ir.Value
    axes: Axes


@dataclasses.dataclass(slots=True)
class Attention:
    """One attention in canonical form.

    Args:
        anchor: the Softmax or Attention node.
        query, key, value: the operands, followed up through layout operators.
        batch: atoms of all axes but the last two of the scores, outermost first: batch and heads.
        rows: atoms of the query length.
        columns: atoms of the key length.
        depth: atoms of the head dim of Q and K.
        v_depth: atoms of V's head dim.
        scale: what Q.K^T of the *bottom* values of query and key is multiplied by; factors on the chains come on top.
        softcap: the cap, 0 for none; applied before every term.
        terms: masks and biases.
        tails: values below the product, the product's own output first.
        band: the mask that the anchor itself applies with minus infinity, None for none.
        nodes: the nodes between the two products, the products included.
        sinks: one more score in each row's sum, aligned with the scores' axes.
        lengths: how many keys of each batch entry there are.
        also: other outputs of the anchor, and the values that take their place.
        readings: other ways to tell ``batch`` from ``rows``, where several axes belong to Q alone.
    """

    anchor: ir.Node
    query: Chain
    key: Chain
    value: Chain
    batch: Axis
    rows: Axis
    columns: Axis
    depth: Axis
    v_depth: Axis
    scale: float
    softcap: float
    terms: list[Term]
    tails: list[Tail]
    band: Band | None
    nodes: list[ir.Node]
    sinks: Side | None = None
    lengths: Side | None = None
    also: list[tuple[ir.Value, ir.Value]] = dataclasses.field(default_factory=list)
    readings: list[tuple[Axis, Axis]] = dataclasses.field(default_factory=list)
