# SPDX-License-Identifier: Apache-2.0
"""Inputs that count keys: between which numbers they make sense, read from the operators that take such counts.

ONNX's ``Attention`` and our own operators say how many keys are visible. ONNX Runtime's ``GroupQueryAttention`` holds
``seqlens_k + 1`` keys of each batch entry after the step, at least the new ones, and ``total_sequence_length`` at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.contrib_product import CONTRIB_DOMAIN
from flash_export.dims import ONE, Dim
from flash_export.op import DOMAIN, FLASH_ATTENTION_EX, LAYOUT_BHSD
from flash_export.shapes import Shapes

_LONGEST = 63
"""Where no axis bounds a number: some lengths end inside the sequences that the check draws, some behind short ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A number of keys from ``low`` to ``high``, both included; ``high`` None: no axis says where the keys end."""

    low: Dim
    high: Dim | None

    def moved(self, by: int) -> Span:
        """The span of a number that is larger by ``by``."""
        return Span(self.low + Dim.of(by), None if self.high is None else self.high + Dim.of(by))

    def limits(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Both ends at these sizes of the dynamic dims; a dim without a size says nothing."""
        low = self.low.evaluate(sizes) if self.low.symbols <= set(sizes) else 1
        high = self.high.evaluate(sizes) if self.high is not None and self.high.symbols <= set(sizes) else _LONGEST
        return low, max(low, high)


def span_of(node: ir.Node, operand: int, shapes: Callable[[], Shapes]) -> Span | None:
    """What ``node`` asks of an operand that counts keys; None where it does not count any, or its sizes are unknown."""
    reader = _READERS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type, operand))
    span = None if reader is None else reader(node, shapes())
    if span is None or _is_unknown(span.low) or (span.high is not None and _is_unknown(span.high)):
        return None
    return span


def span_of_compared(positions: ir.Value, shapes: Callable[[], Shapes]) -> Span:
    """What a number that is compared with ``positions`` may be: from 1 to as many as there are."""
    shape = shapes().shape(positions)
    long = [dim for dim in shape or () if dim != ONE]
    return Span(ONE, long[0] if len(long) == 1 and not _is_unknown(long[0]) else None)


def draw_lengths(
    rng: np.random.Generator, shape: tuple[int, ...], limits: tuple[int, int], *, full: bool, turn: int
) -> np.ndarray:
    """Lengths between ``limits``, or all the largest.

    Else they take turns, starting with the ``turn``-th: the largest, one in the upper half, any, one in the upper half.
    """
    low, high = limits
    half = np.array([high, (low + high + 1) // 2, low, (low + high + 1) // 2])
    turns = (np.arange(np.prod(shape, dtype=np.int64)).reshape(shape) + turn) % 4
    return rng.integers(high if full else half[turns], high + 1, shape, dtype=np.int64)


def _is_unknown(dim: Dim) -> bool:
    return any(name.startswith("?") for name in dim.symbols)


def _axis(node: ir.Node, index: int, axis: int, shapes: Shapes) -> Dim | None:
    """The length of an axis of an input."""
    shape = shapes.shape(g.input_of(node, index))
    return None if shape is None or not -len(shape) <= axis < len(shape) else shape[axis]


def _behind(node: ir.Node, past: int, axis: int, new: Dim | None, shapes: Shapes) -> Dim | None:
    """``new`` keys behind those of the past at input ``past``."""
    if new is None or g.input_of(node, past) is None:
        return new
    old = _axis(node, past, axis, shapes)
    return None if old is None else old + new


def _up_to(high: Dim | None) -> Span | None:
    return None if high is None else Span(ONE, high)


def _standard(node: ir.Node, shapes: Shapes) -> Span | None:
    return _up_to(_behind(node, 4, 2, _axis(node, 1, -2, shapes), shapes))


def _ours(node: ir.Node, shapes: Shapes) -> Span | None:
    return _up_to(_axis(node, 1, 2 if g.int_attribute(node, "layout", 0) == LAYOUT_BHSD else 1, shapes))


def _multihead(node: ir.Node, shapes: Shapes) -> Span | None:
    """The key padding mask, where it is lengths; keys packed beside values have their length at axis 1 too."""
    mask, key = shapes.shape(g.input_of(node, 4)), shapes.shape(g.input_of(node, 1) or node.inputs[0])
    if mask is None or len(mask) != 1 or key is None:
        return None
    return _up_to(_behind(node, 6, 2, key[2 if len(key) == 4 else 1], shapes))


def _packed_weights(node: ir.Node, shapes: Shapes) -> Span | None:
    mask = shapes.shape(g.input_of(node, 3))
    if mask is None or len(mask) != 1:
        return None
    return _up_to(_behind(node, 4, 3, _axis(node, 0, 1, shapes), shapes))


def _after_the_step(node: ir.Node, shapes: Shapes) -> tuple[Dim, Dim] | None:
    """The new keys of a GroupQueryAttention node, and the most that its cache may hold after them."""
    new, past = _axis(node, 0, 1, shapes), _axis(node, 3, 2, shapes)
    total = _behind(node, 3, 2, new, shapes)
    if new is None or total is None:
        return None
    present = shapes.shape(node.outputs[1]) if len(node.outputs) > 1 else None
    in_one_buffer = past is not None and present is not None and len(present) == 4 and present[2] == past
    return new, past if in_one_buffer and past is not None else total


def _last_keys(node: ir.Node, shapes: Shapes) -> Span | None:
    found = _after_the_step(node, shapes)
    return None if found is None else Span(*found).moved(-1)


def _total(node: ir.Node, shapes: Shapes) -> Span | None:
    found = _after_the_step(node, shapes)
    return None if found is None else Span(found[1], found[1])


def _counted_new(node: ir.Node, shapes: Shapes) -> Span | None:
    """All of the new keys: rows behind those that count are unspecified, and no check can compare them."""
    new = _axis(node, 0, 1, shapes)
    return None if new is None else Span(new, new)


_READERS: dict[tuple[str, str, int], Callable[[ir.Node, Shapes], Span | None]] = {
    ("", "Attention", 6): _standard,
    (DOMAIN, FLASH_ATTENTION_EX.name, FLASH_ATTENTION_EX.inputs.index("kv_lengths")): _ours,
    (CONTRIB_DOMAIN, "MultiHeadAttention", 4): _multihead,
    (CONTRIB_DOMAIN, "Attention", 3): _packed_weights,
    (CONTRIB_DOMAIN, "GroupQueryAttention", 5): _last_keys,
    (CONTRIB_DOMAIN, "GroupQueryAttention", 6): _total,
    (CONTRIB_DOMAIN, "GroupQueryAttention", 16): _counted_new,
}
"""Domain, operator and operand -> its reader."""
