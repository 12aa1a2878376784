# SPDX-License-Identifier: Apache-2.0
"""Attention of which a part lies in a branch of an If or a body of a Loop or Scan, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Refused, name_of

_FLOW = ("If", "Loop", "Scan", "SequenceMap")


def has_branches(node: ir.Node) -> bool:
    """Whether the node runs graphs of its own."""
    return g.is_op(node, *_FLOW)


def entering(owners: Iterable[ir.Node]) -> dict[ir.Value, ir.Value]:
    """The inputs of the bodies of ``owners``, each with the value that it is given, or at first is given.

    Both lists end alike: a Scan of old has one more operand in front.
    """
    return {
        inner: outer
        for owner in owners
        for body in g.held(owner)
        if isinstance(body, ir.Graph)
        for inner, outer in zip(reversed(body.inputs), reversed(owner.inputs), strict=False)
        if outer is not None
    }


def place(node: ir.Node) -> tuple[str, str]:
    """The branch or body of ``node`` in words, and the way out for an attention in it."""
    if node.op_type == "If":
        action = "export the branches as models of their own (optimum: without merging the decoders)"
        return f"a branch of If {name_of(node)}", action
    action = "unroll the loop when exporting, or export its body as a model of its own"
    return f"the body of {node.op_type} {name_of(node)}", action


def crossing(what: str, node: ir.Node) -> Refused:
    """Why an attention stays of which ``what`` lies on the other side of the border of a branch or body of ``node``."""
    where, action = place(node)
    return Refused(
        "subgraph",
        f"{what} in {where}, and the rest of the attention does not; a rewrite takes all of it or nothing",
        node,
        f"compute what differs before the attention (torch.where instead of a branch), or {action}",
    )
