# SPDX-License-Identifier: Apache-2.0
"""A small graph drawn as SVG: nodes in layers from top to bottom, inputs just above their first reader.

Layers by longest path, order within a layer by the mean of the neighbours (Sugiyama, Tagawa and Toda 1981). Colours
come from the page's style sheet. Every text passes ``html.escape``: names are the model file's own.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flash_export.report_example import SIZE_OPERANDS

_LAYER_HEIGHT = 62
_BOX_HEIGHT = 30
_GAP = 18
_CHARACTER_WIDTH = 7.4
_MARGIN = 10
_LONGEST_TEXT = 24
_SWEEPS = 6


@dataclasses.dataclass(slots=True, eq=False)
class _Box:
    """A node, an input, the output, or (``kind`` "bend") a place where a long edge crosses a layer."""

    text: str
    title: str
    kind: str
    layer: int = 0
    x: float = 0.0
    above: list[_Box] = dataclasses.field(default_factory=list)
    below: list[_Box] = dataclasses.field(default_factory=list)

    @property
    def width(self) -> float:
        return 2.0 if self.kind == "bend" else len(self.text) * _CHARACTER_WIDTH + 22


def draw_graph(graph: Mapping[str, Any], label: str) -> str:
    """The SVG of one graph of ``report.json``'s ``example``. Nodes that compute sizes are left out.

    Args:
        graph: as ``report_example.describe`` makes it.
        label: what a screen reader says it is.
    """
    boxes = _boxes(graph)
    _assign_layers(boxes)
    layers = _with_bends(boxes)
    _place(layers)
    return _svg(layers, label)


def _boxes(graph: Mapping[str, Any]) -> list[_Box]:
    """Every box in an order in which each comes after those above it."""
    made: dict[str, _Box] = {
        name: _Box(_shortened(name), f"input {name}", "input") for name in graph["inputs"] if name is not None
    }
    boxes = list(made.values())
    for node in graph["nodes"]:
        if node["sizes"]:
            continue
        op = node["op"].rpartition(".")[2]
        data = node["inputs"][: SIZE_OPERANDS.get(op)]
        operands = [name for name in data if name in made]
        numbers = [graph["scalars"][name] for name in data if name in graph["scalars"]]
        kind = "fused" if op.startswith("FlashAttention") else "softmax" if op == "Softmax" else "node"
        text = " ".join([op, *numbers[:1]]) if kind == "node" else op
        box = _Box(text, f"{node['op']} {node['name']}", kind)
        for name in dict.fromkeys(operands):
            box.above.append(made[name])
            made[name].below.append(box)
        made.update(dict.fromkeys(node["outputs"], box))
        boxes.append(box)
    if graph["output"] in made:
        last = made[graph["output"]]
        output = _Box(_shortened(graph["output"]), f"output {graph['output']}", "input", above=[last])
        last.below.append(output)
        boxes.append(output)
    return [box for box in boxes if box.above or box.below]


def _shortened(name: str) -> str:
    """The end of a long name, which tells more than its beginning."""
    return name if len(name) <= _LONGEST_TEXT else "…" + name[-_LONGEST_TEXT + 1 :]


def _assign_layers(boxes: Sequence[_Box]) -> None:
    for box in boxes:
        box.layer = 1 + max((b.layer for b in box.above), default=-1)
    for box in boxes:
        if not box.above and box.below:
            box.layer = min(b.layer for b in box.below) - 1


def _with_bends(boxes: Sequence[_Box]) -> list[list[_Box]]:
    """The boxes by layer, with an edge that spans several layers cut into one piece a layer."""
    layers: list[list[_Box]] = [[] for _ in range(1 + max((box.layer for box in boxes), default=-1))]
    for box in boxes:
        layers[box.layer].append(box)
    for box in boxes:
        for below in [b for b in box.below if b.layer > box.layer + 1]:
            chain = [box, *(_Box("", "", "bend", layer) for layer in range(box.layer + 1, below.layer)), below]
            box.below.remove(below)
            below.above.remove(box)
            for upper, lower in itertools.pairwise(chain):
                upper.below.append(lower)
                lower.above.append(upper)
            for bend in chain[1:-1]:
                layers[bend.layer].append(bend)
    return layers


def _place(layers: Sequence[list[_Box]]) -> None:
    """Gives every box its x: again and again below, then above, the mean of its neighbours."""
    for layer in layers:
        _spread(layer, lambda box: 0.0)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            _spread(layer, lambda box, down=down: _mean(box.above if down else box.below, box.x))  # type: ignore[misc]


def _mean(neighbours: Sequence[_Box], otherwise: float) -> float:
    return sum(b.x for b in neighbours) / len(neighbours) if neighbours else otherwise


def _spread(layer: list[_Box], wanted: Callable[[_Box], float]) -> None:
    """Sorts ``layer`` by the wanted x and moves boxes apart, so that they are right on average."""
    wishes = {id(box): wanted(box) for box in layer}
    layer.sort(key=lambda box: wishes[id(box)])
    edge = float("-inf")
    for box in layer:
        box.x = max(wishes[id(box)], edge + _GAP + box.width / 2)
        edge = box.x + box.width / 2
    shift = sum(wishes[id(box)] - box.x for box in layer) / max(len(layer), 1)
    for box in layer:
        box.x += shift


def _svg(layers: Sequence[Sequence[_Box]], label: str) -> str:
    boxes = [box for layer in layers for box in layer]
    left = min((box.x - box.width / 2 for box in boxes), default=0.0) - _MARGIN
    right = max((box.x + box.width / 2 for box in boxes), default=0.0) + _MARGIN
    height = len(layers) * _LAYER_HEIGHT - (_LAYER_HEIGHT - _BOX_HEIGHT) + 2 * _MARGIN
    edges = [_edge(box, below) for box in boxes for below in box.below]
    shapes = [_shape(box) for box in boxes if box.kind != "bend"]
    return (
        f'<svg class="graph" role="img" aria-label="{html.escape(label)}" width="{right - left:.0f}" '
        f'height="{height}" viewBox="{left:.0f} 0 {right - left:.0f} {height}">' + "".join([*edges, *shapes]) + "</svg>"
    )


def _top(box: _Box) -> int:
    return _MARGIN + box.layer * _LAYER_HEIGHT


def _edge(upper: _Box, lower: _Box) -> str:
    """A curve from box to box; through a bend it goes straight down for the height of a box."""
    start, end = _top(upper) + _BOX_HEIGHT, _top(lower)
    middle = (start + end) / 2
    through = f" V {end + _BOX_HEIGHT}" if lower.kind == "bend" else ""
    curve = f"M {upper.x:.1f} {start} C {upper.x:.1f} {middle} {lower.x:.1f} {middle} {lower.x:.1f} {end}{through}"
    return f'<path class="edge" d="{curve}"/>'


def _shape(box: _Box) -> str:
    radius = _BOX_HEIGHT / 2 if box.kind == "input" else 5
    return (
        f'<g class="{box.kind}"><title>{html.escape(box.title)}</title>'
        f'<rect x="{box.x - box.width / 2:.1f}" y="{_top(box)}" width="{box.width:.1f}" height="{_BOX_HEIGHT}" '
        f'rx="{radius:g}"/><text x="{box.x:.1f}" y="{_top(box) + 20}">{html.escape(box.text)}</text></g>'
    )
