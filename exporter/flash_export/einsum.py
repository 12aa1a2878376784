# SPDX-License-Identifier: Apache-2.0
"""What an Einsum's equation says: one letter for each axis, an ellipsis spelled out, an output that is not written too.

The equation's language is NumPy's, as ONNX's Einsum defines it: axes of one letter have one length or broadcast from 1,
and the axes of an ellipsis are aligned at their right ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_FIRST = 0xE000
"""The axes of an ellipsis are letters from here on, of Unicode's private use area: no equation has them."""


def letters(node: ir.Node, ranks: Sequence[int | None]) -> tuple[list[str], str] | None:
    """The letters of the operands' axes and of the output's, e.g. ``(["bhqd", "bhkd"], "bhqk")``.

    None where the equation fits no operands of these ranks, or has a letter twice in one term (a diagonal).
    """
    attribute = node.attributes.get("equation")
    text = "" if attribute is None else "".join(attribute.as_string().split())
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks) or None in ranks:
        return None
    spelled = [_spelled(term, rank) for term, rank in zip(terms, ranks, strict=True) if rank is not None]
    if None in spelled:
        return None
    operands = [term for term in spelled if term is not None]
    ellipsis = _ellipsis(max((len(o) - len(t.replace("...", "")) for o, t in zip(operands, terms, strict=True))))
    if arrow:
        lost = ellipsis and "..." not in right
        out = right.replace("...", ellipsis, 1)
    else:
        lost = ""
        everywhere = "".join(operands)
        out = ellipsis + "".join(sorted(x for x in set(everywhere) - set(ellipsis) if everywhere.count(x) == 1))
    known = set("".join(operands))
    if lost or "." in out or not set(out) <= known or any(len(set(x)) != len(x) for x in (*operands, out)):
        return None
    return operands, out


def _ellipsis(count: int) -> str:
    """The letters of ``count`` axes, the last one always the same."""
    return "".join(chr(_FIRST + i) for i in reversed(range(count)))


def _spelled(term: str, rank: int) -> str | None:
    """One letter for each of ``rank`` axes; None where the term has another number of them."""
    count = rank - len(term.replace("...", "", 1))
    if count < 0 or (count and "..." not in term):
        return None
    spelled = term.replace("...", _ellipsis(count), 1)
    return None if "." in spelled else spelled
