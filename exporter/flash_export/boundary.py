# SPDX-License-Identifier: Apache-2.0
"""What stands at the edge of one fused attention, and what its scores look like for given numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import graph as g
from flash_export.cut import CannotCut, attention_nodes, cut, reaches
from flash_export.op import FLASH_ATTENTION_PACKED, LAYOUT_BHSD, OPERATORS
from flash_export.runtime import AnySession, CannotRun, open_session
from flash_export.sites import Site

_DATA_OPERANDS = frozenset({"query", "key", "value", "qkv"})
_ROWS_MEASURED = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary of one site, sorted by what the check does with each value.

    ``drawn`` values are random; ``captured`` ones keep the content that the model gives them; of the ``shaped`` ones
    (with their types) only the lengths are read, so they are empty but for these; ``stretched`` are the drawn ones that
    are multiplied to reach the score spread; with ``squared`` they are query and key at once, so that scores grow with
    the square.
    """

    drawn: tuple[str, ...]
    captured: tuple[str, ...]
    stretched: tuple[str, ...]
    squared: bool
    shaped: Mapping[str, ir.DataType] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.drawn, *self.captured, *self.shaped)


def read_boundary(site: Site, plain: ir.Model, flash: ir.Model) -> Boundary:
    """Sorts the boundary of ``site`` by what the fused graph does with it, and the unfused one ``plain``.

    Whatever is computed into query, key or value is drawn. Integers, truths and what becomes bias, lengths or
    nothing at all (a proven mask) are captured: a random mask would be no mask.

    Raises:
        CannotCut: the site does not lie between its boundary and its output, in either graph.
    """
    before, part = (cut(model, site.boundary, [site.output]) for model in (plain, flash))
    data: set[str] = set()
    for node in attention_nodes(part):
        for operand, value in zip(OPERATORS[node.op_type].inputs, node.inputs, strict=True):
            if operand in _DATA_OPERANDS:
                data |= reaches(value)
    inputs = {value.name or "": value for value in part.graph.inputs}
    drawn = tuple(name for name, value in inputs.items() if name in data and _is_float(value))
    old = {value.name: value for value in before.graph.inputs}
    shaped = {
        name: value.dtype
        for name, value in inputs.items()
        if name not in drawn and value.dtype is not None and _has_lengths_alone(value) and _has_lengths_alone(old[name])
    }
    captured = tuple(name for name in inputs if name not in drawn and name not in shaped)
    query, key = (source if source in drawn else None for source in (site.query_source, site.key_source))
    source = query or key
    if source is None or query == key:
        return Boundary(drawn, captured, drawn if source is None else (source,), squared=True, shaped=shaped)
    return Boundary(drawn, captured, (source,), squared=False, shaped=shaped)


def _has_lengths_alone(value: ir.Value) -> bool:
    """Whether nothing that reads ``value`` takes more of it than its lengths."""
    return not value.is_graph_output() and all(g.is_op(node, "Shape", "Size") for node, _ in value.uses())


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


class ScoreMeter:
    """Measures the standard deviation of scale * Q.K^T, before cap, bias and mask, as the fused node sees them."""

    def __init__(self, site: Site, boundary: Boundary, flash: ir.Model, folder: Path) -> None:
        self._session: AnySession | None = None
        self._attributes = site.attributes
        part = cut(flash, site.boundary, [site.output])
        nodes = attention_nodes(part)
        if len(nodes) != 1 or self._attributes is None:
            return
        self._packed = nodes[0].op_type == FLASH_ATTENTION_PACKED.name
        self._operands = [v.name or "" for v in nodes[0].inputs[: 1 if self._packed else 2] if v is not None]
        made = [name for name in self._operands if name not in boundary.names]
        try:
            self._session = open_session(cut(flash, site.boundary, made or [site.output]), folder)
        except (CannotCut, CannotRun):
            return
        self._made = made

    def measure(self, feeds: Mapping[str, np.ndarray]) -> float | None:
        """The spread of the scores on ``feeds``; None where they cannot be seen or there are none."""
        if self._session is None or self._attributes is None:
            return None
        values = dict(feeds)
        if self._made:
            try:
                values.update(zip(self._made, self._session.run(feeds, self._made), strict=True))
            except CannotRun:
                return None
        operands = [values[name] for name in self._operands]
        if any(array.size == 0 for array in operands):
            return None
        query, key = self._heads(operands)
        scores = self._attributes.scale * (query[:, :, :_ROWS_MEASURED] @ np.swapaxes(key, -1, -2))
        return float(scores.std())

    def _heads(self, operands: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Query and key as ``[B, Hq, S, D]`` in float64, the key's heads repeated for their group."""
        attributes = self._attributes
        assert attributes is not None
        heads_q, heads_kv = attributes.q_num_heads, attributes.kv_num_heads
        if self._packed:
            dim = operands[0].shape[-1] // (heads_q + 2 * heads_kv)
            query, key, _ = np.split(operands[0], [heads_q * dim, (heads_q + heads_kv) * dim], axis=-1)
        else:
            query, key = operands
        if self._packed or attributes.layout != LAYOUT_BHSD:
            query = query.reshape(*query.shape[:2], heads_q, -1).transpose(0, 2, 1, 3)
            key = key.reshape(*key.shape[:2], heads_kv, -1).transpose(0, 2, 1, 3)
        return query.astype(np.float64), np.repeat(key.astype(np.float64), heads_q // heads_kv, axis=1)
