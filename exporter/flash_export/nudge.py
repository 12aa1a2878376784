# SPDX-License-Identifier: Apache-2.0
"""The same model on numbers a hair off, to see its rounding more than once.

A maximum over few numbers scatters, and other numbers have other extremes. Numbers times 1 - k/128 round anew at every
step and are conditioned alike, so their largest error is a second sample of the same thing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.input_roles import read_roles

_INPUT = "flash_export/nudge"


def add_nudge(model: ir.Model) -> ir.Model:
    """A copy whose embeddings (rows gathered from a float table) are multiplied by one more input, a scalar.

    A factor of 1 changes nothing, not even a rounding.
    """
    nudged = model.clone()
    by = ir.Value(name=_INPUT, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
    for node in list(nudged.graph):
        table = node.inputs[0] if g.is_op(node, "Gather") else None
        if table is None or not table.is_initializer() or table.dtype != ir.DataType.FLOAT:
            continue
        if table.shape is not None and len(table.shape) >= 2:
            _multiply(node, by)
    nudged.graph.inputs.append(by)
    return nudged


def _multiply(node: ir.Node, by: ir.Value) -> None:
    """The product takes the name of the node's output, so that whoever asks for it gets the nudged one."""
    rows = node.outputs[0]
    product = ir.node("Mul", [rows, by])
    moved = product.outputs[0]
    moved.type, moved.shape = rows.type, rows.shape
    rows.replace_all_uses_with(moved, replace_graph_outputs=True)
    product.replace_input_with(0, rows)
    moved.name, rows.name = rows.name, f"{rows.name}/before_nudge"
    node.append(product)


def numbers(model: ir.Model) -> frozenset[str]:
    """The graph inputs that are plain numbers and can be nudged: no masks, no indices."""
    return frozenset(name for name, role in read_roles(model).items() if role.kind == "number")


def feeds(original: Mapping[str, np.ndarray], nudged: Collection[str], k: int) -> dict[str, np.ndarray]:
    """Inputs for the copy that ``add_nudge`` made: the originals at k = 0."""
    by = factor(k)
    result = {name: np.asarray(array * by) if k and name in nudged else array for name, array in original.items()}
    return result | {_INPUT: np.asarray(by)}


def factor(k: int) -> np.float32:
    """Below 1, so that a fill of finfo.min stays finite."""
    return np.float32(1 - k / 128)
