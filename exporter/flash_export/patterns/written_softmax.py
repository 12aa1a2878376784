# SPDX-License-Identifier: Apache-2.0
"""A softmax that is written out between two products: exponentials over their sum, or the Exp of a LogSoftmax.

It is found so that it is not passed over in silence, and refused: whether sum, maximum and quotient belong together is
told by the Softmax operator alone.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Attention, NoAnchor, Refused
from flash_export.patterns.nearby import product_above, product_below
from flash_export.region import users


def read(anchor: ir.Node, region: object) -> Attention:
    """Refuses an ``Exp`` or ``LogSoftmax`` that makes the probabilities of attention.

    Raises:
        Refused: ``softmax_written_out``.
        NoAnchor: the node makes none.
    """
    source, readers = anchor.inputs[0], users(anchor.outputs[0])
    wanted = "Exp" if anchor.op_type == "LogSoftmax" else "ReduceSum"
    weighs = any(g.is_op(node, wanted) for node in readers) and any(product_below(node) for node in readers)
    if source is None or not weighs or not product_above(source):
        raise NoAnchor
    how = "the Exp of a LogSoftmax" if anchor.op_type == "LogSoftmax" else "exponentials divided by their sum"
    raise Refused(
        "softmax_written_out",
        f"the softmax between the products is written out, as {how}",
        anchor,
        "write torch.softmax(scores, -1), or call scaled_dot_product_attention, and export the model again",
    )
