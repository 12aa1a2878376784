# SPDX-License-Identifier: Apache-2.0
"""Cuts one attention out of a model, as a small model of its own that runs at any size."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
import onnx_ir.passes.common

from flash_export.op import DOMAIN
from flash_export.shapes import Shapes


class CannotCut(Exception):
    """The site does not lie between its boundary and its output in this graph; the text says why."""


def cut(model: ir.Model, boundary: Collection[str], outputs: Sequence[str]) -> ir.Model:
    """The part of ``model`` that computes ``outputs`` from ``boundary``, constants and local functions included.

    Boundary values that are initializers keep their numbers and are no inputs. The inputs' shapes are forgotten:
    the cut is run at several sizes.

    Raises:
        CannotCut: a name is not in the main graph, or something outside the boundary is needed.
    """
    known = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    missing = [name for name in (*boundary, *outputs) if name not in known]
    if missing:
        raise CannotCut(f"{missing} are no values of the main graph")
    inputs = [name for name in boundary if not known[name].is_initializer()]
    if any(known[name].dtype is None for name in (*inputs, *outputs)):
        _complete_types(model)
    try:
        graph = ir.convenience.extract(model.graph, inputs, outputs)
    except ValueError as error:
        raise CannotCut(str(error)) from error
    for value in (*graph.inputs, *graph.outputs):
        value.shape = None
    part = ir.Model(graph, ir_version=model.ir_version, functions=[f.clone() for f in model.functions.values()])
    onnx_ir.passes.common.RemoveUnusedFunctionsPass()(part)
    return part


def _complete_types(model: ir.Model) -> None:
    """Notes the types of values that the file and onnx know none of: what lies below ONNX Runtime's own operators."""
    shapes = Shapes(model.graph)
    for node in model.graph:
        for value in node.outputs:
            dtype = shapes.dtype(value)
            if value.dtype is None and dtype is not None:
                value.dtype = dtype


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    """The FlashAttention nodes of the graph and its subgraphs."""
    return [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.domain == DOMAIN]


def reaches(value: ir.Value | None) -> set[str]:
    """Names of the graph inputs that ``value`` is computed from as numbers (what only gives a shape is left out)."""
    found: set[str] = set()
    todo = [] if value is None else [value]
    seen = set(todo)
    while todo:
        current = todo.pop()
        producer = current.producer()
        if producer is None:
            found.add(current.name or "")
        elif producer.op_type not in ("Shape", "Size"):
            new = [v for v in producer.inputs if v is not None and v not in seen]
            seen.update(new)
            todo.extend(new)
    return found
