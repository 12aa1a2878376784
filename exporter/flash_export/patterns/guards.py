# SPDX-License-Identifier: Apache-2.0
"""Guards of the probabilities: ``Where(IsNaN(p), 0, p)``, as ``masked_fill`` of it and ``nan_to_num`` are exported.

A keyless row gives 0, which is what FlashAttention gives anyway. ``nan_to_num`` replaces infinities too, which
probabilities never are; its conditions read the probabilities themselves or what the step before has made of them.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.enlarging import refuse_longer
from flash_export.layout import FLOATS
from flash_export.mask_terms import uniform
from flash_export.region import Region, users

_MOST = 3
"""Replacements in a row: of NaN, of infinity, of minus infinity."""
_DEEP = 6
"""Operators from the probabilities to a condition."""
_DECIDES = ("And", "Cast", "CastLike", "Equal", "Greater", "Identity", "IsInf", "IsNaN", "Less", "Not")
"""What a condition is made of."""


def guards_below(value: ir.Value, region: Region) -> list[ir.Node]:
    """The Wheres, one below the other, that guard ``value``; empty where there is none, or somebody else reads it.

    The result of the last one is ``value`` with 0 in the place of NaN, or ``value`` itself.

    Raises:
        Refused: ``probabilities_changed`` for a guard whose number would make more probabilities.
    """
    chain: list[ir.Node] = []
    held = [value]
    whole = 0
    while len(chain) < _MOST and not held[-1].is_graph_output():
        found = [n for n in users(held[-1]) if _guards(n, held, region)]
        if len(found) != 1:
            break
        chain += found
        if all(_read_by(v, chain) for v in held):
            whole = len(chain)
        held.append(found[0].outputs[0])
    return chain[:whole]


def _guards(node: ir.Node, held: list[ir.Value], region: Region) -> bool:
    """Whether ``node`` is ``Where(condition, number, last of held)`` and changes no probability but NaN to 0."""
    if not g.is_op(node, "Where") or node.inputs[2] is not held[-1] or held[-1] in node.inputs[:2]:
        return False
    condition, number = _plain(node.inputs[0]), node.inputs[1]
    fill = None if number is None else uniform(number, region.evaluator)
    if number is None or fill is None or condition is None:
        return False
    guards = (fill == 0.0 and _asks_for_nan(condition, held)) or _is_never(condition, held)
    if guards:
        refuse_longer(number, held[-1], node, region.shapes)
    return guards


def _asks_for_nan(condition: ir.Value, held: list[ir.Value]) -> bool:
    """Whether a condition is ``IsNaN(p)``, or ``p != p``, which nothing else fulfils."""
    node = condition.producer()
    if g.is_op(node, "Not"):
        node = node.inputs[0].producer() if node is not None and node.inputs[0] is not None else None
        if not g.is_op(node, "Equal") or node is None or node.inputs[0] is not node.inputs[1]:
            return False
    elif not g.is_op(node, "IsNaN"):
        return False
    return node is not None and _is_one(node.inputs[0], held)


def _is_never(condition: ir.Value | None, held: list[ir.Value]) -> bool:
    """Whether a condition asks for an infinity among probabilities, beside whatever else."""
    condition = _plain(condition)
    node = None if condition is None else condition.producer()
    sides = [_plain(v) for v in node.inputs] if node is not None and g.is_op(node, "And") else [condition]
    tests = [None if v is None else v.producer() for v in sides]
    return any(n is not None and g.is_op(n, "IsInf") and _is_one(n.inputs[0], held) for n in tests)


def _plain(value: ir.Value | None) -> ir.Value | None:
    """A condition before casts of truths to truths, which exporters leave."""
    for _ in range(_DEEP):
        node = None if value is None else value.producer()
        truth = g.is_op(node, "Cast") and g.int_attribute(node, "to", 0) == ir.DataType.BOOL  # type: ignore[arg-type]
        if not truth and not g.is_op(node, "Identity"):
            break
        above = node.inputs[0]  # type: ignore[union-attr]
        maker = None if above is None else above.producer()
        if truth and not g.is_op(maker, "And", "Cast", "Identity", "IsInf", "IsNaN", "Not"):
            break
        value = above
    return value


def _is_one(value: ir.Value | None, held: list[ir.Value]) -> bool:
    """Whether a value is one of ``held``, after casts from one float type to another, which a probability survives."""
    for _ in range(_DEEP):
        if value is None or value in held:
            break
        node = value.producer()
        if node is None or not g.is_op(node, "Identity", "Cast"):
            break
        if g.is_op(node, "Cast") and g.int_attribute(node, "to", 0) not in FLOATS:
            break
        value = node.inputs[0]
    return value in held


def _read_by(value: ir.Value, chain: list[ir.Node]) -> bool:
    """Whether nobody reads ``value`` but the Wheres of ``chain``, as what they guard or for their conditions."""
    if value.is_graph_output():
        return False
    todo = [(node, 0) for node in users(value) if node not in chain]
    if any(node.inputs[1] is value or node.inputs[0] is value for node in chain):
        return False
    while todo:
        node, depth = todo.pop()
        made = node.outputs[0]
        if not g.is_op(node, *_DECIDES) or made.is_graph_output() or depth >= _DEEP:
            return False
        for reader in users(made):
            if reader in chain:
                if made in reader.inputs[1:]:
                    return False
            else:
                todo.append((reader, depth + 1))
    return True
