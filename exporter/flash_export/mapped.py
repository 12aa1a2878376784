# SPDX-License-Identifier: Apache-2.0
"""Weights that lie in a file are read one at a time, so that a big model is never in memory as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir


@contextlib.contextmanager
def mapped(tensor: ir.TensorProtocol) -> Iterator[ir.TensorProtocol]:
    """``tensor``, whose file is unmapped after the block if it was not mapped before it; keep no view of its numbers.

    onnx_ir maps a file on the first read and holds the map for as long as the tensor lives. Each page that was read
    counts as memory of this process.
    """
    ours = isinstance(tensor, ir.ExternalTensor) and tensor.raw is None
    try:
        yield tensor
    finally:
        if ours:
            tensor.release()  # type: ignore[attr-defined]
