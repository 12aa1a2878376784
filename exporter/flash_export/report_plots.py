# SPDX-License-Identifier: Apache-2.0
"""The plots of ``report.html`` as SVG: memory over length, a histogram of errors, bars of seconds."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 560
_HEIGHT = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 96, 14, 44
_BINS = 10
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(size_bytes: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    power = min(int(math.log(size_bytes, 1024)), len(_UNITS) - 1) if size_bytes >= 1 else 0
    return f"{size_bytes / 1024**power:.3g} {_UNITS[power]}"


def memory_plot(memory: Mapping[str, Any]) -> str:
    """Bytes over length, both on logarithmic axes: a line a kind, with its last value written at its end."""
    lengths: Sequence[int] = memory["lengths"]
    series = {"unfused": memory["unfused_bytes"], "fused": memory["fused_bytes"]}
    low = math.floor(math.log2(min(min(s) for s in series.values())))
    high = math.ceil(math.log2(max(max(s) for s in series.values())))

    def x(length: float) -> float:
        first, last = math.log2(lengths[0]), math.log2(lengths[-1])
        return _LEFT + (math.log2(length) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(size_bytes: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log2(size_bytes) - low) / max(high - low, 1) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_grid_line(y(2.0**p), bytes_text(2.0**p)) for p in range(low, high + 1) if p % 4 == 0]
    parts += [_text(x(s), _HEIGHT - _BOTTOM + 18, f"{s:,}", "middle") for s in lengths[:: 2 if len(lengths) > 6 else 1]]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "sequence length", "middle"))
    for name, sizes in series.items():
        points = " ".join(f"{x(s):.1f},{y(b):.1f}" for s, b in zip(lengths, sizes, strict=True))
        parts.append(f'<polyline class="line {name}" points="{points}"/>')
        for length, size in zip(lengths, sizes, strict=True):
            dot = f'<circle class="dot {name}" cx="{x(length):.1f}" cy="{y(size):.1f}" r="3.5">'
            parts.append(f"{dot}<title>{name}, {length:,}: {bytes_text(size)}</title></circle>")
        parts.append(_text(x(lengths[-1]) + 10, y(sizes[-1]) - 3, name, "start", f"strong {name}"))
        parts.append(_text(x(lengths[-1]) + 10, y(sizes[-1]) + 13, bytes_text(sizes[-1]), "start"))
    return _svg("memory of one attention over the sequence length", _HEIGHT, parts)


def shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """For sites and for whole models: each run's largest error as a share of what was tolerated."""
    found: dict[str, list[float]] = {"site": [], "model": []}
    for run in runs:
        error, tolerance = run.get("max_abs_error"), run.get("tolerance")
        if error is not None and tolerance:
            found[run["kind"]].append(error / tolerance)
    return found


def error_histogram(runs: Sequence[Mapping[str, Any]]) -> str:
    """How many runs came how near to their tolerance; sites below, whole models stacked on them."""
    counts = {kind: [0] * _BINS for kind in ("site", "model")}
    for kind, values in shares(runs).items():
        for value in values:
            counts[kind][min(int(value * _BINS), _BINS - 1)] += 1
    tallest = max(max(map(sum, zip(*counts.values(), strict=True))), 1)
    step = (_WIDTH - _LEFT - 20) / _BINS
    unit = (_HEIGHT - _TOP - _BOTTOM) / tallest
    ticks = sorted({round(tallest * i / 4) for i in range(5)})
    parts = [_grid_line(_HEIGHT - _BOTTOM - t * unit, f"{t}", right=20) for t in ticks]
    for i in range(_BINS):
        floor = float(_HEIGHT - _BOTTOM)
        for kind, column in counts.items():
            if column[i]:
                floor -= column[i] * unit
                title = f"{column[i]} {kind} run(s) at {10 * i} to {10 * i + 10} % of the tolerance"
                parts.append(
                    f'<rect class="bar {kind}" x="{_LEFT + i * step + 2:.1f}" y="{floor:.1f}" width="{step - 4:.1f}" '
                    f'height="{column[i] * unit:.1f}"><title>{title}</title></rect>'
                )
    parts += [_text(_LEFT + i * step, _HEIGHT - _BOTTOM + 18, f"{10 * i} %", "middle") for i in range(0, _BINS + 1, 2)]
    parts.append(_text((_LEFT + _WIDTH - 20) / 2, _HEIGHT - 6, "largest error as a share of the tolerance", "middle"))
    return _svg("histogram of the errors that the check measured", _HEIGHT, parts)


def seconds_bars(seconds: Mapping[str, float]) -> str:
    """One bar a step, the longest over the whole width."""
    longest = max(seconds.values(), default=0.0) or 1.0
    parts = []
    for i, (name, value) in enumerate(seconds.items()):
        y = 6 + 30 * i
        width = value / longest * (_WIDTH - 90 - 80)
        parts.append(_text(80, y + 16, name, "end"))
        parts.append(f'<rect class="bar time" x="90" y="{y}" width="{max(width, 1):.1f}" height="22" rx="3"/>')
        parts.append(_text(98 + width, y + 16, f"{value:.2f} s", "start"))
    return _svg("seconds of each step", 12 + 30 * len(seconds), parts)


def _grid_line(y: float, text: str, right: int = _RIGHT) -> str:
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 8, y + 4, text, "end")


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(label: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg class="plot" role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {height}">'
    return head + "".join(parts) + "</svg>"
