# SPDX-License-Identifier: Apache-2.0
"""Why a node between the product of Q and K and the softmax is no part of a known term."""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Refused
from flash_export.patterns.branches import crossing, has_branches
from flash_export.patterns.nearby import summed_product, written_out
from flash_export.patterns.quantized import QUANTIZE_AFTERWARDS, in_scores


def unread(node: ir.Node) -> Refused:
    """The refusal of a node that no reader of the scores takes."""
    if g.is_op(node, "Concat"):
        return Refused(
            "sink",
            "something else than one column is concatenated to the scores before the softmax",
            node,
            "a sink is one column behind the last key; this attention stays in standard operators",
        )
    if summed_product(node):
        return written_out(node)
    if has_branches(node):
        return crossing("the scores are made", node)
    quantized = in_scores(node)
    if quantized is not None:
        return Refused("quantized", f"{quantized.op_type} lies in the scores", quantized, QUANTIZE_AFTERWARDS)
    return Refused(
        "unknown_operator",
        f"{node.op_type} lies between the product of Q and K and the softmax and is no scale, mask, bias or layout",
        node,
        "leave it, or report the model: each term of the scores has a reader of its own",
    )
