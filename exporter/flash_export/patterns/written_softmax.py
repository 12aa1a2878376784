# SPDX-License-Identifier: Apache-2.0
"""A softmax that is written out between two products: exponentials of any base over their sum, the Exp of a LogSoftmax,
or the Exp of scores less the logarithm of that sum.

It is found so that it is not passed over in silence, and refused: whether sum, maximum and quotient belong together is
told by the Softmax operator alone.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Attention, NoAnchor, Refused
from flash_export.patterns.nearby import product_above, product_below
from flash_export.region import users

_SUMS = ("ReduceSum", "ReduceLogSum", "ReduceL1")

_FORMS = {
    "Exp": (_SUMS, "exponentials divided by their sum"),
    "Pow": (_SUMS, "powers divided by their sum"),
    "LogSoftmax": (("Exp",), "the Exp of a LogSoftmax"),
    "ReduceLogSumExp": (("Exp",), "the Exp of scores less a ReduceLogSumExp"),
}
"""Anchor -> the operators that make probabilities of what it gives, and how that is called."""

_STEPS = ("Cast", "Expand", "Identity", "Neg", "Reshape", "Squeeze", "Unsqueeze")
"""What may lie between a logarithm of a sum and the Sub or Add that takes it from the scores."""


def read(anchor: ir.Node, region: object) -> Attention:
    """Refuses an ``Exp``, ``Pow``, ``LogSoftmax`` or ``ReduceLogSumExp`` that makes the probabilities of attention.

    Raises:
        Refused: ``softmax_written_out``.
        NoAnchor: the node makes none.
    """
    source, readers = anchor.inputs[anchor.op_type == "Pow"], users(anchor.outputs[0])  # a Pow has its scores second
    wanted, how = _FORMS[anchor.op_type]
    if anchor.op_type == "ReduceLogSumExp":
        readers = [node for node in _below(readers) if g.is_op(node, "Exp")]
    weighs = any(g.is_op(node, *wanted) for node in readers) and any(product_below(node) for node in readers)
    if source is None or not weighs or not product_above(source):
        raise NoAnchor
    raise Refused(
        "softmax_written_out",
        f"the softmax between the products is written out, as {how}",
        anchor,
        "write torch.softmax(scores, -1), or call scaled_dot_product_attention, and export the model again; a number "
        "that is added to the sum is a sink: concatenate its logarithm to the scores as one more column, and cut that "
        "off after the softmax",
    )


def _below(nodes: list[ir.Node]) -> list[ir.Node]:
    """Who reads the scores less what ``nodes`` make of a logarithm, and each ``Exp`` of the logarithm itself."""
    found, todo = [], list(nodes)
    for node in todo:  # grows
        if g.is_op(node, "Sub", "Add"):
            found += users(node.outputs[0])
        elif g.is_op(node, "Exp"):
            found.append(node)
        elif g.is_op(node, *_STEPS):
            todo += [n for n in users(node.outputs[0]) if n not in todo]
    return found
