# SPDX-License-Identifier: Apache-2.0
"""Local functions that hold attention become part of the main graph, where their attention can be cut out and proven.

Both sides of the check do the same to their file, so that values have the same names; a file is changed only where a
site inside a function is fused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

import onnx_ir as ir
import onnx_ir.passes.common

from flash_export import function_opset
from flash_export import graph as g
from flash_export.op import DOMAIN

SHARED_BYTES = 1024
"""A constant of a function's body that is larger is kept once, however often the function is called."""


class CannotInline(Exception):
    """The functions cannot become part of the graph; the text says why."""


def inline(model: ir.Model, operators: Collection[tuple[str, str]]) -> None:
    """Inlines every function that holds one of ``operators`` (domain, name), in place.

    Names are a function of the file alone.

    Raises:
        CannotInline: another version of an operator than the main graph's opset has, functions that call themselves.
    """
    holding = functions_with(model, operators)
    for why in function_opset.align(model, holding).values():
        raise CannotInline(why)
    _inline(model, lambda function: function.identifier() in holding)
    _share_constants(model.graph)


def inline_all(model: ir.Model) -> None:
    """Inlines every function, in place.

    Raises:
        CannotInline: as ``inline``.
    """
    for why in function_opset.align(model, model.functions).values():
        raise CannotInline(why)
    _inline(model, lambda function: True)


def _inline(model: ir.Model, which: Callable[[ir.Function], bool]) -> None:
    try:
        onnx_ir.passes.common.InlinePass(which)(model)
    except (ValueError, ir.passes.PreconditionError, ir.passes.PassError) as error:
        raise CannotInline(str(error.__cause__ or error).splitlines()[0]) from error


def functions_with(model: ir.Model, operators: Collection[tuple[str, str]]) -> set[ir.OperatorIdentifier]:
    """The functions with such an operator in them, and those that call one of these; none that is one itself."""
    found: set[ir.OperatorIdentifier] = set()
    while True:
        new = {
            identifier
            for identifier, function in model.functions.items()
            if identifier not in found
            and function.domain != DOMAIN
            and identifier[:2] not in operators
            and any(
                (n.domain if n.domain != "ai.onnx" else "", n.op_type) in operators or n.op_identifier() in found
                for n in function.all_nodes()
            )
        }
        if not new:
            return found
        found |= new


def _share_constants(graph: ir.Graph) -> None:
    """Large constants that every call of a function brought along are one again."""
    same: dict[int, list[ir.Node]] = defaultdict(list)
    for node in graph:
        value = node.attributes.get("value") if g.is_op(node, "Constant") else None
        if value is not None and g.tensor_of(value).nbytes >= SHARED_BYTES:
            same[id(value.value)].append(node)
    for first, *others in same.values():
        for other in others:
            if not other.outputs[0].is_graph_output():
                other.outputs[0].replace_all_uses_with(first.outputs[0])
                graph.remove(other, safe=True)
