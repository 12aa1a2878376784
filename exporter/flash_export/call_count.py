# SPDX-License-Identifier: Apache-2.0
"""How much a model's local functions ask for, counted without following every call.

Whatever runs a model writes each call of a function out. A few functions that each call the next one twice are a small
file and more nodes than any machine holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import onnx

Identifier = tuple[str, str, str]
"""Domain, name and overload."""


MANY = 2**62
"""More are not counted: the number itself would fill memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A graph with its calls written out: ``nodes``, ``MANY`` at most, and how ``deep`` calls lie in one another."""

    nodes: int
    deep: int


def written_out(model: onnx.ModelProto) -> Written:
    """What ``model`` is with its calls written out. Each function is looked at once.

    A call that leads back into a function that is being followed counts as a node without a body: what reads the model
    refuses it by its own name.
    """
    bodies = functions_of(model)
    called = {identifier: _calls(function.node, bodies) for identifier, function in bodies.items()}
    own = {identifier: sum(1 for _ in all_nodes(function.node)) for identifier, function in bodies.items()}
    known: dict[Identifier, Written] = {}

    def total(nodes: int, calls: Iterable[Identifier]) -> Written:
        inner = [known[identifier] for identifier in calls if identifier in known]
        nodes = min(nodes + sum(one.nodes for one in inner), MANY)
        return Written(nodes, 1 + max((one.deep for one in inner), default=0))

    for root in bodies:
        # Depth first with a stack of its own: how deep functions call one another is the file's choice.
        pending, open_ = [root], set()
        while pending:
            identifier = pending[-1]
            if identifier in known:
                pending.pop()
            elif identifier in open_:
                known[pending.pop()] = total(own[identifier], called[identifier])
            else:
                open_.add(identifier)
                pending += {one for one in called[identifier] if one not in known and one not in open_}
    main = total(sum(1 for _ in all_nodes(model.graph.node)), _calls(model.graph.node, bodies))
    return Written(main.nodes, main.deep - 1)


def functions_of(model: onnx.ModelProto) -> dict[Identifier, onnx.FunctionProto]:
    """The local functions by what a call names."""
    return {(function.domain, function.name, function.overload): function for function in model.functions}


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """``nodes`` and those of the graphs in them; calls are not followed."""
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            yield node
            for attribute in node.attribute:
                waiting += [graph.node for graph in ([attribute.g] if attribute.HasField("g") else attribute.graphs)]


def _calls(nodes: Iterable[onnx.NodeProto], bodies: Mapping[Identifier, onnx.FunctionProto]) -> list[Identifier]:
    names = ((node.domain, node.op_type, node.overload) for node in all_nodes(nodes))
    return [name for name in names if name in bodies]
