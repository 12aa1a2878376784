# SPDX-License-Identifier: Apache-2.0
"""Readers of the user's own operators at work: what one does wrong is said of its module, not of ours.

A reader of ours that fails is our bug, and comes through as what it is.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from flash_export.bands import Band
from flash_export.canonical import Added, Attention, Hidden, NoAnchor, NotAttention, Refused, Side, Tail, name_of
from flash_export.errors import UsageError, UserError
from flash_export.layout import Atom, Chain
from flash_export.own_code import ANYTHING, raised, recurs_in_own
from flash_export.plan import Plan, make_plan
from flash_export.region import Region

Reader = Callable[[ir.Node, Region], Attention]

_NEED = "a function read(anchor, region) that returns canonical.Attention, or raises Refused or NotAttention"
_MENDED = "mend the reader; patterns.operator.attention_of makes the form of an operator's parts (docs/api.md)"


def root_of(reader: object) -> str:
    """The package that a reader is defined in, "" where that is not known."""
    while isinstance(reader, functools.partial):
        reader = reader.func
    return str(getattr(reader, "__module__", None) or "").partition(".")[0]


def read_and_plan(reader: Reader, node: ir.Node, region: Region) -> tuple[Attention, Plan]:
    """What ``reader`` reads around ``node``, and the node that computes it.

    Raises:
        NoAnchor, NotAttention, Refused: as the reader or the plan says.
        UsageError: a reader of the user's own raises anything else, or returns what is no attention.
    """
    if root_of(reader) == __package__:
        attention = reader(node, region)
        return attention, make_plan(attention, region)
    where = f"{_place(reader)}, at node {name_of(node)} ({node.domain or 'ai.onnx'}::{node.op_type})"
    with _own_mistakes("the pattern's reader fails", where):
        attention = reader(node, region)
    wrong = _wrong_field(attention, node)
    if wrong:
        raise UsageError("the pattern's reader returns no attention", where=where, got=wrong, need=_NEED, do=_MENDED)
    for name in _NUMBERS:
        setattr(attention, name, float(getattr(attention, name)))  # a 1 or a NumPy number is as good
    with _own_mistakes("the attention that the pattern's reader returns cannot be planned", where):
        return attention, make_plan(attention, region)


@contextmanager
def _own_mistakes(what: str, where: str) -> Iterator[None]:
    try:
        yield
    except Refused as error:
        if all(isinstance(part, str) for part in dataclasses.astuple(error.reason)):
            raise
        got = f"Refused{dataclasses.astuple(error.reason)!r}"[:300]
        need = "Refused(code, text, node, action) with a code, a text and an action that are strings"
        raise UsageError(what, where=where, got=got, need=need, do=_MENDED) from error
    except (NoAnchor, NotAttention, UserError):
        raise
    except ANYTHING as error:
        if isinstance(error, RecursionError) and not recurs_in_own(error):
            raise  # what lies around the node is too deep for ours
        raise UsageError(what, where=where, got=raised(error), need=_NEED, do=_MENDED) from error


def _place(reader: Reader) -> str:
    """Where a reader is defined: its module, and the line where it has one."""
    inner: object = reader
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    code = getattr(inner, "__code__", None)
    at = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(inner, '__module__', None) or 'a module'}.{name}{at}"


_CLASSES: dict[str, type | tuple[type, ...]] = {
    "anchor": ir.Node,
    **dict.fromkeys(("query", "key", "value"), Chain),
    "band": (Band, type(None)),
    **dict.fromkeys(("sinks", "lengths"), (Side, type(None))),
}
_LISTS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("batch", "rows", "columns", "depth", "v_depth"), Atom),
    "terms": (Added, Hidden),
    "tails": Tail,
    "nodes": ir.Node,
    **dict.fromkeys(("also", "readings"), tuple),
}
_NUMBERS = ("scale", "softcap")


def _wrong_field(attention: object, node: ir.Node) -> str:
    """What is wrong about what a reader returned; "" for an attention whose fields are of their types."""
    if not isinstance(attention, Attention):
        return f"{attention!r}, a {type(attention).__name__}"[:300]
    for field in dataclasses.fields(attention):
        value = getattr(attention, field.name)
        if field.name in _CLASSES:
            right = isinstance(value, _CLASSES[field.name])
        elif field.name in _NUMBERS:
            right = isinstance(value, numbers.Real)
        else:
            right = isinstance(value, list) and all(isinstance(one, _LISTS[field.name]) for one in value)
        if not right:
            return f"an Attention whose {field.name} is {value!r}, of {type(value).__name__}"[:300]
    wrong = {
        f"a band of {attention.band!r}": not _whole(attention.band),
        f"also = {attention.also!r}, not pairs of values": not all(map(_two_values, attention.also)),
        "another anchor than the node": attention.anchor is not node,
        "nodes without the anchor": node not in attention.nodes,
        "no tails: no value that the product with V makes": not attention.tails,
    }
    return next((f"an Attention with {what}"[:300] for what, so in wrong.items() if so), "")


def _whole(band: Band | None) -> bool:
    """Whether the bounds are whole numbers, or none."""
    return band is None or all(bound is None or isinstance(bound, int) for bound in (band.left, band.right))


def _two_values(pair: tuple[object, ...]) -> bool:
    return len(pair) == 2 and all(isinstance(value, ir.Value) for value in pair)
