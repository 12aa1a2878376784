# SPDX-License-Identifier: Apache-2.0
"""What a bias of queries x keys is made of, as far as that tells its user how to make it smaller."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.advice import GUARD
from flash_export.feeds import BiasFeed
from flash_export.own_sites import pattern_of
from flash_export.plan import Plan
from flash_export.sites import Site

_LARGE = 1e3
"""From here on a number in a mask is taken to hide, whatever its sign: ``(mask - 1) * 10000`` hides as well."""
_MOST_NODES = 200
"""Of those above a mask that are searched for such a number."""
_LAYOUT = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze")

_SMALLER = "so that causal becomes an attribute and padding one row"
_STAYS = "what differs for each query (ALiBi, relative positions, a prefix, a mask that is an input) stays"


def warning(sites: Sequence[Site]) -> str | None:
    """What is said of the sites among ``sites`` that read a bias of queries x keys; None where none does."""
    square = [s for s in sites if s.status == "fused" and not s.already and 1 not in (s.bias_shape or [1])[-2:]]
    if not square:
        return None
    causes = {cause for site in square for cause in _causes(site)}
    patterns = sorted(filter(None, map(pattern_of, square)))
    advice = []
    if "finite" in causes:
        hide = "hide them with -inf or a boolean mask, not with a large finite number"
        advice.append(f"where it only hides positions, {hide}, {_SMALLER}")
    if "shown_again" in causes:
        drop = "where it only spares rows of padding, drop it and guard the probabilities with nan_to_num"
        advice.append(f"a term that shows keys again, as in `mask | eye`, keeps the mask whole: {drop}, {_SMALLER}")
    if patterns:
        reader = f"the reader in {', '.join(dict.fromkeys(patterns))} may give a triangle or window as `band`"
        advice.append(f"{reader} and the rest as `masks` of one row, [B, 1, 1, Skv] (docs/api.md)")
    what = f"{len(square)} attention(s) read a bias of queries x keys: the model builds that tensor, S x S"
    guard = f". {GUARD}" if causes else ""
    return f"{what}\n  do: {'; '.join([*advice, _STAYS])}{guard}"


def _causes(site: Site) -> Iterator[str]:
    """``finite`` for a mask that hides by a finite number, ``shown_again`` for one that shows hidden keys again."""
    if not isinstance(site.match, Plan) or pattern_of(site):
        return  # the reader of a pattern makes the mask, not the model
    for part in site.match.biases:
        values = [feed.value for feed in part.feeds if feed.moves or not _is_row(feed.value)]
        if values and any(_shows_again(value, keep) for value, keep in _conditions(part)):
            yield "shown_again"
        if (values and math.isfinite(part.fill)) if part.keeps else any(map(_holds_a_large_number, values)):
            yield "finite"


def _is_row(value: ir.Value) -> bool:
    """Whether a value of rank 4 is known to be the same for all queries or all keys."""
    node = value.producer()
    if value.shape is None and node is not None and g.is_op(node, "Where"):
        condition, *fills = node.inputs
        return condition is not None and _is_row(condition) and all(g.scalar(fill) is not None for fill in fills)
    return value.shape is not None and len(value.shape) == 4 and 1 in (value.shape[2], value.shape[3])


def _conditions(part: BiasFeed) -> Iterator[tuple[ir.Value, bool]]:
    """The booleans that a part hides by, each with the truth that leaves a key visible."""
    if part.keeps:
        yield from ((feed.value, keep) for feed, keep in zip(part.feeds, part.keeps, strict=True))
        return
    for feed in part.feeds:
        node = _below_layout(feed.value).producer()
        if g.is_op(node, "Where") and node is not None and node.inputs[0] is not None:
            yield node.inputs[0], not _hides(node.inputs[1])


def _hides(value: ir.Value | None) -> bool:
    return any(number < 0 for number in _numbers(None if value is None else _below_layout(value)))


def _below_layout(value: ir.Value) -> ir.Value:
    """The value that ``value`` is a cast or another layout of."""
    while g.is_op(node := value.producer(), *_LAYOUT) and node is not None and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _shows_again(value: ir.Value, keep: bool) -> bool:
    """Whether a key that one part of the condition hides is visible by another."""
    value = _below_layout(value)
    node = value.producer()
    if g.is_op(node, "Not") and node is not None and node.inputs[0] is not None:
        return _shows_again(node.inputs[0], not keep)
    if g.is_op(node, "And" if keep else "Or") and node is not None:
        return any(_shows_again(v, keep) for v in node.inputs if v is not None)
    return g.is_op(node, "Or" if keep else "And")


def _holds_a_large_number(value: ir.Value) -> bool:
    """Whether a float constant above ``value`` is as large as those that hide, and finite."""
    stack, seen = [value], {value}
    while stack and len(seen) <= _MOST_NODES:
        value = stack.pop()
        if any(_LARGE <= abs(number) < math.inf for number in _numbers(value)):
            return True
        node = value.producer()
        above = [] if node is None else [v for v in node.inputs if v is not None and v not in seen]
        stack += above
        seen.update(above)
    return False


def _numbers(value: ir.Value | None) -> list[float]:
    """The extremes of a float constant or of what ConstantOfShape repeats; none of anything else."""
    node = None if value is None else value.producer()
    if node is not None and g.is_op(node, "ConstantOfShape"):
        attribute = node.attributes.get("value")
        array = None if attribute is None else g.tensor_of(attribute).numpy()
    else:
        array = g.constant(value)
    if array is None or not array.size or array.dtype.kind in "biuOSU":
        return []
    wide = array.astype(np.float64)
    return [float(wide.min()), float(wide.max())]
