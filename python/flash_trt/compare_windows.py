# SPDX-License-Identifier: Apache-2.0
"""The windows of FUSED's attentions, and whether REFERENCE has lengths past them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from flash_export.draw import dynamic_dims
from flash_trt.lengths import LARGEST_DIM
from flash_trt.onnx_file import OnnxFile


def sizes_of(fused: OnnxFile | None) -> set[int]:
    """The sizes of the windows of FUSED's attentions; none of an engine, whose attributes are not read."""
    values = [node.attributes for node in fused.flash_nodes] if fused else []
    found = {attributes.get(name) for attributes in values for name in ("window_left", "window_right")}
    return {size for size in found if isinstance(size, int) and size >= 0}


def may_be_passed(model: ir.Model, ranges: Mapping[str, tuple[int, int]], length: int) -> bool:
    """Whether REFERENCE's dynamic dims, with ``ranges`` where they are known, let an attention be of ``length``."""
    lengths = [name for name, is_batch in dynamic_dims(model).items() if not is_batch]
    return sum(ranges.get(name, (0, LARGEST_DIM))[1] for name in lengths) >= length
