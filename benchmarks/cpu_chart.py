# SPDX-License-Identifier: Apache-2.0
"""A line chart as SVG text, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 48, 200, 40, 40
COLOURS = ("#0b6e4f", "#6fb98f", "#b23a48", "#d98324", "#5b5f97", "#8d6a9f", "#333333")


def chart(title: str, xs: Sequence[int], series: Mapping[str, Sequence[float | None]]) -> str:
    """Lines over ``xs``, which are spaced evenly; a point that is None is left out.

    Args:
        title: stands above.
        xs: labels of the horizontal axis.
        series: name -> one value for each x; the vertical axis begins at 0.
    """
    top = max((y for ys in series.values() for y in ys if y is not None), default=1.0) * 1.05
    across = (WIDTH - LEFT - RIGHT) / max(1, len(xs) - 1)

    def place(i: int, y: float) -> tuple[float, float]:
        return LEFT + i * across, HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [text(LEFT, 20, title, size=14)]
    for step in range(5):
        y = top * step / 4
        _, down = place(0, y)
        parts.append(f'<path d="M{LEFT} {down:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text(8, down + 4, f"{y:.0f}"))
    parts += [text(place(i, 0)[0] - 12, HEIGHT - 16, f"{x:,}") for i, x in enumerate(xs)]
    drawn = [(name, [place(i, y) for i, y in enumerate(ys) if y is not None]) for name, ys in series.items()]
    lines = [(name, points) for name, points in drawn if points]
    for n, (name, points) in enumerate(lines):
        colour = COLOURS[n % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(text(WIDTH - RIGHT + 16, TOP + 18 * n, name, colour=colour))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', '<rect width="100%" height="100%" fill="white"/>']
    return "\n".join([*head, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, *, size: int = 12, colour: str = "#333") -> str:
    """One text element."""
    style = f'font-family="sans-serif" font-size="{size}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
