# SPDX-License-Identifier: Apache-2.0
"""The refusal ``dtype``: who has which type (Q, K, V, the output, a factor), and the node that made one wider."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Attention, Refused, Side
from flash_export.drafts import is_draft
from flash_export.layout import Chain
from flash_export.shapes import Shapes

_NAMES = {ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}
_HALVES = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
_LOOKED_AT = 64
"""Nodes above Q or K among which the cast is looked for: a rotation has about ten."""

_Types = Set[ir.DataType | None]


def no_common_type(attention: Attention, shapes: Shapes) -> Refused:
    """The refusal of an attention whose Q, K, V and output share none of the types that the operator has."""
    chains = {"Q": attention.query, "K": attention.key, "V": attention.value}
    found: dict[str, _Types] = {name: {shapes.dtype(v) for v in chain.values} for name, chain in chains.items()}
    found["the output"] = {shapes.dtype(tail.value) for tail in attention.tails}
    text = _told(found)
    wide = [name for name in ("Q", "K") if found[name] == {ir.DataType.FLOAT}]
    if not wide or not found["V"] <= _HALVES:
        action = "cast them to one type beside the attention: fp32, fp16 or bf16"
        return Refused("dtype", text, attention.anchor, action)
    factor, half = _factor_of(attention.query), _spelled(shapes.dtype(attention.value.values[-1]))
    if factor is not None and "Q" in wide:
        text += f'; the factor "{factor.name}" of the scores\' rows, which becomes one of Q, is fp32'
        return Refused("dtype", text, attention.anchor, _before(half))
    casts = [_widening(chains[name].values[0], shapes) for name in wide]
    made = next((node for node in casts if node is not None), None)
    if made is not None:
        reader = next((node for node, _ in made.outputs[0].uses() if node.op_type != "Cast"), None)
        text += f"; {wide[casts.index(made)]} is cast to fp32" + ("" if reader is None else f" for a {reader.op_type}")
    action = (
        "where fp32 tables of a rotation (cos, sin) do that, cast q and k to v's type after the rotation, or cos and "
        "sin to x.dtype before it"
    )
    return Refused("dtype", text, made or attention.anchor, action)


def unlike_factor(query: ir.Value, side: Side, shapes: Shapes) -> Refused:
    """The refusal of a factor of the scores' rows that has another type than Q.

    In Q's type the factor, and its product with Q, would be rounded as the graph rounds neither.
    """
    own, other = (_spelled(shapes.dtype(value)) for value in (query, side.value))
    return Refused(
        "dtype",
        f"Q is {own}, and the factor \"{side.value.name}\" of the scores' rows {other}; only one of Q's own type can"
        " become a factor of Q",
        side.node,
        _before(own),
    )


def _before(dtype: str) -> str:
    return f"multiply q by the factor, cast to {dtype}, before the product of Q and K"


def _factor_of(query: Chain) -> ir.Value | None:
    """The factor of the scores' rows that was written down as one of Q; None where there is none."""
    value = query.values[0]
    node = value.producer() if is_draft(value) else None
    return node.inputs[1] if node is not None and g.is_op(node, "Mul") else None


def _told(found: Mapping[str, _Types]) -> str:
    """``Q and K are fp32, V and the output fp16``."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name, types in found.items():
        alike[" or ".join(sorted(_spelled(dtype) for dtype in types))].append(name)
    if len(alike) == 1:
        return f"Q, K, V and the output are {next(iter(alike))}"
    first, *others = ((_joined(names), "are" if len(names) > 1 else "is", types) for types, names in alike.items())
    return ", ".join([" ".join(first), *(f"{names} {types}" for names, _, types in others)])


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def _spelled(dtype: ir.DataType | None) -> str:
    return "of unknown type" if dtype is None else _NAMES.get(dtype, dtype.name.lower())


def _widening(value: ir.Value, shapes: Shapes) -> ir.Node | None:
    """The nearest node above ``value`` that makes fp32 of a half type; None where it is not near."""
    waiting, seen = [value], 0
    while waiting and seen < _LOOKED_AT:
        node, seen = waiting.pop(0).producer(), seen + 1
        if node is None:
            continue
        if g.is_op(node, "Cast") and node.inputs and shapes.dtype(node.inputs[0]) in _HALVES:
            return node
        waiting += [v for v in node.inputs if v is not None and shapes.dtype(v) == ir.DataType.FLOAT]
    return None
