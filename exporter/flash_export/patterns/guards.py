# SPDX-License-Identifier: Apache-2.0
"""Guards of the probabilities: ``Where(IsNaN(p), 0, p)``, as ``masked_fill`` of it and ``nan_to_num`` are exported.

``Where(Not(IsNaN(p)), p, 0)`` is the same. A keyless row gives 0, which is what FlashAttention gives anyway.
``nan_to_num`` replaces infinities too, which probabilities never are; its conditions read the probabilities themselves
or what the step before has made of them.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Refused
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
        if all(_read_by(v, chain, held) for v in held):
            whole = len(chain)
        held.append(found[0].outputs[0])
    return chain[:whole]


def other_number(value: ir.Value, region: Region) -> Refused | None:
    """The refusal of a Where that is a guard of ``value`` but for its number; None where there is none."""
    for node in users(value):
        found = _replaced(node, value)
        if found is None or not _asks_for_nan(found[0], [value], found[2]) or not _read_by(value, [node], [value]):
            continue
        fill = uniform(found[1], region.evaluator)
        if fill != 0.0:
            return Refused(
                "probabilities_changed",
                f"Where puts {'what is not one known number' if fill is None else f'{fill:g}'} in the place of"
                " probabilities that are NaN, those of a row without a visible key; FlashAttention gives 0 there",
                node,
                "put 0 there, or leave this attention in standard operators",
            )
    return None


def _replaced(node: ir.Node, kept: ir.Value) -> tuple[ir.Value, ir.Value, bool] | None:
    """Condition and number of a Where that is ``kept`` elsewhere, and whether the number stands where it is true."""
    if not g.is_op(node, "Where") or node.inputs[0] is kept:
        return None
    condition = _plain(node.inputs[0])
    for at in (2, 1):
        number = node.inputs[3 - at]
        if node.inputs[at] is kept and condition is not None and number is not None and number is not kept:
            return condition, number, at == 2
    return None


def _guards(node: ir.Node, held: list[ir.Value], region: Region) -> bool:
    """Whether ``node`` is a Where that is the last of ``held`` and changes no probability but NaN to 0."""
    found = _replaced(node, held[-1])
    fill = None if found is None else uniform(found[1], region.evaluator)
    if found is None or fill is None:
        return False
    condition, number, where_true = found
    zeroes = fill == 0.0 and _asks_for_nan(condition, held, where_true)
    guards = zeroes or (where_true and _is_never(condition, held))
    if guards:
        refuse_longer(number, held[-1], node, region.shapes)
    return guards


def _asks_for_nan(condition: ir.Value, held: list[ir.Value], truth: bool) -> bool:
    """Whether a condition is ``truth`` where ``p`` is NaN, as by ``IsNaN(p)`` or ``p != p``, and only there."""
    node = condition.producer()
    for _ in range(_DEEP):
        if node is None or not g.is_op(node, "Not"):
            break
        above = _plain(node.inputs[0])
        node, truth = (None if above is None else above.producer()), not truth
    if node is None or not g.is_op(node, "IsNaN" if truth else "Equal"):
        return False
    return (truth or node.inputs[0] is node.inputs[1]) and _is_one(node.inputs[0], held)


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


def _read_by(value: ir.Value, chain: list[ir.Node], kept: list[ir.Value]) -> bool:
    """Whether nobody reads ``value`` but the Wheres of ``chain``, as what they guard (``kept``) or for conditions."""
    if value.is_graph_output():
        return False
    todo = [(node, 0) for node in users(value) if node not in chain]
    if any(v is value for node, own in zip(chain, kept, strict=False) for v in node.inputs if v is not own):
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
