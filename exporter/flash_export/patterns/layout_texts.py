# SPDX-License-Identifier: Apache-2.0
"""What is said of a layout operator whose axes cannot be followed: the lengths that do not match, and the way out."""

from __future__ import annotations

import onnx_ir as ir

from flash_export.shape_rules import reshape_target
from flash_export.shapes import Shapes

RENAME_LENGTHS = (
    "where two of these lengths are one, take both from the .shape of the same tensor, or export with that length "
    "fixed; else the attention stays in standard operators"
)


def rearranged(node: ir.Node, shapes: Shapes) -> str:
    """From which shape to which, as far as they are known: ``from [4*B, S, S] to [B, 4, L, L], which ...``."""
    before = shapes.shape(node.inputs[0])
    after = (reshape_target(shapes, node) if node.op_type == "Reshape" else None) or shapes.shape(node.outputs[0])
    if before is None or after is None:
        return "in a way that cannot be followed"
    text = f"from {list(before)} to {list(after)}, which cannot be followed"
    return text.replace("?(", "(")  # a quotient's name says how it is computed
