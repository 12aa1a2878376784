# SPDX-License-Identifier: Apache-2.0
"""Latencies as an SVG: a bar to the median, a line from the 10th to the 90th percentile, one group a setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

_WIDTH, _BAR_LEFT, _BAR_WIDTH = 960, 24, 760
_ROW, _HEADER = 44, 34
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # told apart by colour-blind eyes too
_STYLE = (
    "svg{background:#fff;color:#222;font:13px system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{background:#1b1b1b;color:#ddd}}"
    "text{fill:currentColor}.whisker{stroke:currentColor;stroke-width:1.5}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One contender: 10th, 50th and 90th percentile in milliseconds."""

    label: str
    low_ms: float
    median_ms: float
    high_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The contenders of one setting; they share a scale of their own."""

    title: str
    bars: Sequence[Bar]


def draw(groups: Sequence[Group]) -> str:
    """The plot as one self-contained SVG file."""
    y, parts = 10, []
    for group in groups:
        parts.append(f'<text x="{_BAR_LEFT}" y="{y + 20}" font-weight="bold">{escape(group.title)}</text>')
        y += _HEADER
        longest = max((bar.high_ms for bar in group.bars), default=0.0) or 1.0
        for i, bar in enumerate(group.bars):
            parts.append(_bar(bar, y, longest, _COLOURS[i % len(_COLOURS)]))
            y += _ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 10}" width="{_WIDTH}" role="img">'
    return f"{head}<title>latency, less is better</title><style>{_STYLE}</style>{''.join(parts)}</svg>\n"


def _bar(bar: Bar, y: int, longest: float, colour: str) -> str:
    def x(value: float) -> str:
        return f"{_BAR_LEFT + _BAR_WIDTH * value / longest:.1f}"

    width = f"{_BAR_WIDTH * bar.median_ms / longest:.1f}"
    middle = y + 24
    return (
        f'<text x="{_BAR_LEFT}" y="{y + 10}">{escape(bar.label)}</text>'
        f'<rect x="{_BAR_LEFT}" y="{y + 15}" width="{width}" height="18" fill="{colour}"/>'
        f'<line class="whisker" x1="{x(bar.low_ms)}" x2="{x(bar.high_ms)}" y1="{middle}" y2="{middle}"/>'
        f'<text x="{_BAR_LEFT + _BAR_WIDTH + 8}" y="{middle + 5}">{bar.median_ms:.3g} ms</text>'
    )
