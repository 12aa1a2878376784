# SPDX-License-Identifier: Apache-2.0
"""The sizes of windows in masks that a model brings ready-made: tables of queries and keys, cut to length."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

_SHORTEST = 16
"""Keys in a table: shorter ones end before any length that is tried."""
_MOST_ENDS = 4
"""Along one row or column: where numbers change more often they are weights."""


def numbers_in_tables(model: ir.Model) -> dict[int, str]:
    """Each number of keys or queries behind which a mask changes -> the name of the first table where one does.

    The first row of a mask tells how far a window reaches to the right, the first column how far to the left; those of
    branches, loops and functions count too.
    """
    found: dict[int, str] = {}
    for name, table in _tables(model):
        plane = _plane(table)
        for line in () if plane is None else (plane[0], plane[:, 0]):
            ends = np.flatnonzero(line[1:] != line[:-1]) + 1
            if len(ends) > _MOST_ENDS:
                break
            for end in ends.tolist():
                found.setdefault(end, name)
    return found


def _plane(table: ir.TensorProtocol) -> np.ndarray | None:
    """Queries by keys, of the first batch entry and head; None where it is none."""
    shape, dtype = table.shape.numpy(), table.dtype
    if len(shape) < 2 or min(shape[-2:]) < _SHORTEST or 0 in shape or dtype.bitwidth < 8 or dtype == ir.DataType.STRING:
        return None
    plane: np.ndarray = table.numpy().reshape(-1, *shape[-2:])[0]
    return plane


def _tables(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """The constants of a model by the names of their values."""
    graphs = [model.graph, *model.graph.subgraphs(), *(g for f in model.functions.values() for g in f.subgraphs())]
    for graph in graphs:
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                yield name, value.const_value
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        for node in ir.traversal.RecursiveGraphIterator(body):
            constant = node.attributes.get("value") if node.op_type == "Constant" else None
            if constant is not None and constant.type == ir.AttributeType.TENSOR:
                yield node.outputs[0].name or "", constant.as_tensor()
