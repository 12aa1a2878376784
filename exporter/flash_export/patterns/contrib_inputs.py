# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime's operators must be given: onnx's checker knows none of them, so their readers ask here first."""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Refused
from flash_export.region import Region

_RANKS: dict[str, dict[int, tuple[int, ...]]] = {
    "Attention": {0: (3,), 1: (2,), 2: (1,), 4: (5,)},
    "BiasSoftmax": {},
    "GroupQueryAttention": {0: (3,), 1: (3,), 2: (3,), 3: (4,), 4: (4,), 5: (1,), 9: (2,)},
    "MultiHeadAttention": {0: (3, 5), 1: (3, 4, 5), 2: (3, 4), 3: (1,), 6: (4,), 7: (4,)},
}
"""Operator -> input -> the ranks that it may have."""
_REQUIRED = {"Attention": (0, 1), "BiasSoftmax": (0, 1), "GroupQueryAttention": (0,), "MultiHeadAttention": (0,)}
_COUNTS = {
    "Attention": ("num_heads",),
    "BiasSoftmax": (),
    "GroupQueryAttention": ("num_heads", "kv_num_heads"),
    "MultiHeadAttention": ("num_heads",),
}


def require_inputs(anchor: ir.Node, region: Region) -> None:
    """Accepts a node whose inputs are there and have the ranks that its text gives them.

    Raises:
        Refused: ``operand_shapes``, or ``head_count`` where a number of heads is not positive.
    """
    for name in _COUNTS[anchor.op_type]:
        if g.int_attribute(anchor, name, 0) < 1:
            raise Refused("head_count", f"{name} is {g.int_attribute(anchor, name, 0)}", anchor, _ACTION)
    for index in _REQUIRED[anchor.op_type]:
        if g.input_of(anchor, index) is None:
            raise Refused("operand_shapes", f"input {index} of {anchor.op_type} is missing", anchor, _ACTION)
    for index, ranks in _RANKS[anchor.op_type].items():
        shape = region.shapes.shape(g.input_of(anchor, index))
        if shape is not None and len(shape) not in ranks:
            text = f"input {index} of {anchor.op_type} has shape {list(shape)}, not rank {' or '.join(map(str, ranks))}"
            raise Refused("operand_shapes", text, anchor, _ACTION)


_ACTION = "check the model in ONNX Runtime"
