# SPDX-License-Identifier: Apache-2.0
"""Which numbers of an attention come from rows whose every key carries a large number, beside which scores lose digits.

``score - 1e9`` is a multiple of 64 in float32. A key that is hidden so beside a visible one weighs nothing, and nobody
sees it; in a row of such keys alone the weights are off by all that the scores say. What rounding does there says
nothing about the other rows, so the check judges the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export.cut import CannotCut, attention_nodes, cut
from flash_export.op import FLASH_ATTENTION_EX, LAYOUT_BHSD, Attributes
from flash_export.runtime import CannotRun, open_session
from flash_export.sites import Site

LARGE = 2.0**10
"""A bias from this size on takes ten binary digits of a score and more."""


class DrownedRows:
    """Finds them for one site of the fused graph. A site without a bias has none."""

    def __init__(self, site: Site, flash: ir.Model, folder: Path) -> None:
        self._site, self._flash, self._folder = site, flash, folder
        nodes = attention_nodes(cut(flash, site.boundary, [site.output]))
        attributes = site.attributes
        one = len(nodes) == 1 and nodes[0].op_type == FLASH_ATTENTION_EX.name
        self._node = nodes[0] if one and attributes is not None and attributes.has_bias else None

    def of(self, feeds: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """True for each number of the site's output that comes from such a row; None where none does.

        None as well where the output is no rearrangement of the node's, so that a row cannot be followed into it.
        """
        node, attributes = self._node, self._site.attributes
        if node is None or attributes is None:
            return None
        names = dict(zip(FLASH_ATTENTION_EX.inputs, (str(v.name) for v in node.inputs if v is not None), strict=True))
        try:
            (bias,) = self._values([names["bias"]], feeds)
            if not _large(bias).any():
                return None
            wanted = [names[name] for name in ("query", "key", "value", "kv_lengths")]
            query, key, value, lengths = self._values(wanted, feeds)
            if not _fits(bias, query, key, attributes):
                return None  # nor does the node take it
            rows = _drowned(bias, query, key, lengths, attributes)
            return self._followed(_spread(rows, value, attributes), feeds) if rows.any() else None
        except (CannotCut, CannotRun):
            return None

    def _values(self, names: list[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """What the node reads: computed from the boundary, part of it, or a constant."""
        known = ir.convenience.create_value_mapping(self._flash.graph, include_subgraphs=False)
        found: dict[str, np.ndarray] = {name: feeds[name] for name in names if name in feeds}
        for name in names:
            constant = known[name].const_value if known[name].is_initializer() else None
            if constant is not None:
                found[name] = constant.numpy()
        made = [name for name in dict.fromkeys(names) if name not in found]
        if made:
            part = cut(self._flash, self._site.boundary, made)
            found |= zip(made, open_session(part, self._folder).run(feeds, made), strict=True)
        return [found[name] for name in names]

    def _followed(self, rows: np.ndarray, feeds: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """``rows``, of the shape of the node's output, as they stand in the site's."""
        assert self._node is not None
        output = str(self._node.outputs[0].name)
        if output == self._site.output:
            return rows
        below = cut(self._flash, [output, *self._site.boundary], [self._site.output])
        marked = open_session(below, self._folder).run({**feeds, output: rows.astype(np.float32)})[0]
        moved = marked.size == rows.size and int((marked == 1).sum()) == int(rows.sum())
        return np.asarray(marked == 1) if moved else None


def _large(bias: np.ndarray) -> np.ndarray:
    return np.asarray(np.isfinite(bias) & (np.abs(bias) >= LARGE))


def _fits(bias: np.ndarray, query: np.ndarray, key: np.ndarray, attributes: Attributes) -> bool:
    """Whether the bias broadcasts to the scores of these operands."""
    axis = 2 if attributes.layout == LAYOUT_BHSD else 1
    scores = (query.shape[0], attributes.q_num_heads, query.shape[axis], key.shape[axis])
    return all(own in (1, full) for own, full in zip(bias.shape, scores, strict=True))


def _drowned(
    bias: np.ndarray, query: np.ndarray, key: np.ndarray, lengths: np.ndarray, attributes: Attributes
) -> np.ndarray:
    """``[B, Hq, Sq]``: whether the largest bias among the keys that a row sees is a large number."""
    axis = 2 if attributes.layout == LAYOUT_BHSD else 1
    visible = _visible(query.shape[axis], key.shape[axis], lengths, attributes)
    best = np.where(visible, bias, -np.inf).max(axis=-1, initial=-np.inf)
    return np.broadcast_to(_large(best), (query.shape[0], attributes.q_num_heads, query.shape[axis]))


def _visible(rows: int, keys: int, lengths: np.ndarray, attributes: Attributes) -> np.ndarray:
    """``[B or 1, 1, Sq, Skv]``: what the attributes and the lengths leave of the keys."""
    length = np.minimum(lengths, keys) if attributes.has_kv_lengths else np.array([keys])
    length = length.astype(np.int64).reshape(-1, 1, 1, 1)
    j = np.arange(keys)
    behind = j - (np.arange(rows)[:, None] + (length - rows if attributes.diagonal else 0))
    visible = j < length
    if attributes.causal:
        visible = visible & (behind <= 0)
    if attributes.window_left >= 0:
        visible = visible & (behind >= -attributes.window_left)
    if attributes.window_right >= 0:
        visible = visible & (behind <= attributes.window_right)
    return np.asarray(visible)


def _spread(rows: np.ndarray, value: np.ndarray, attributes: Attributes) -> np.ndarray:
    """``[B, Hq, Sq]`` over the numbers of the node's output."""
    if attributes.layout == LAYOUT_BHSD:
        return np.repeat(rows[..., None], value.shape[-1], axis=-1)
    dim = value.shape[-1] // attributes.kv_num_heads
    return np.repeat(rows.transpose(0, 2, 1), dim, axis=-1)
