# SPDX-License-Identifier: Apache-2.0
"""Local functions that hold attention, or parts of it, become part of the main graph, where it is cut out and proven.

Both sides of the check do the same to their file, so that values have the same names; a file is changed only where a
site inside a function is fused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

import onnx_ir as ir
import onnx_ir.passes.common

from flash_export import function_opset
from flash_export import graph as g
from flash_export.contrib_product import CONTRIB_DOMAIN
from flash_export.op import DOMAIN

SHARED_BYTES = 1024
"""A constant of a function's body that is larger is kept once, however often the function is called."""

NEAR = 24
"""Nodes on each side of a softmax among which calls of functions may hide its attention."""

_READ_AS_OPERATORS = (DOMAIN, CONTRIB_DOMAIN, "", "ai.onnx")
"""Domains of operators that are known by name, whatever body a file gives them."""


class CannotInline(Exception):
    """The functions cannot become part of the graph; the text says why."""


def inline(model: ir.Model, operators: Collection[tuple[str, str]]) -> bool:
    """Inlines every function that holds one of ``operators`` (domain, name), in place; False where there is none.

    Names are a function of the file alone.

    Raises:
        CannotInline: another version of an operator than the main graph's opset has, functions that call themselves.
    """
    holding = functions_with(model, operators)
    for why in function_opset.align(model, holding).values():
        raise CannotInline(why)
    return _inline_these(model, holding)


def inline_near(model: ir.Model, operators: Collection[tuple[str, str]]) -> bool:
    """Inlines every function called near one of ``operators`` in the graph, in place; False where there is none.

    Exporters write one function for each operator or layer of the source, and then a softmax stands in the graph while
    the products, or what lies between, are calls. Functions of another opset that says another thing stay calls.

    Raises:
        CannotInline: functions that call themselves, or with graphs as attributes.
    """
    near = _functions_near(model, operators)
    near -= function_opset.align(model, near).keys()
    return _inline_these(model, near)


def _inline_these(model: ir.Model, identifiers: Collection[ir.OperatorIdentifier]) -> bool:
    if identifiers:
        _inline(model, lambda function: function.identifier() in identifiers)
        _share_constants(model.graph)
    return bool(identifiers)


def _functions_near(model: ir.Model, operators: Collection[tuple[str, str]]) -> set[ir.OperatorIdentifier]:
    """The functions called within ``NEAR`` nodes above or below an operator of the graph, and those that they call."""
    own = {i for i in model.functions if i[0] not in _READ_AS_OPERATORS and i[:2] not in operators}
    found: set[ir.OperatorIdentifier] = set()
    for node in model.graph if own else ():
        if (node.domain if node.domain != "ai.onnx" else "", node.op_type) in operators:
            for neighbours in (_above, _below):
                found |= {n.op_identifier() for n in _reached(node, neighbours)} & own
    todo = list(found)
    while todo:
        called = {n.op_identifier() for n in model.functions[todo.pop()].all_nodes()} & own
        todo += called - found
        found |= called
    return found


def _reached(start: ir.Node, neighbours: Callable[[ir.Node], Iterable[ir.Node]]) -> list[ir.Node]:
    """The nodes nearest to ``start`` on one side, ``NEAR`` at most."""
    reached = [start]
    for node in reached:  # grows
        for other in neighbours(node):
            if len(reached) <= NEAR and other not in reached:
                reached.append(other)
    return reached


def _above(node: ir.Node) -> list[ir.Node]:
    return [above for value in g.all_inputs(node) if (above := value.producer()) is not None]


def _below(node: ir.Node) -> list[ir.Node]:
    return [reader for value in node.outputs for reader, _ in value.uses()]


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
