# SPDX-License-Identifier: Apache-2.0
"""``report.html``: the content of ``report.json`` as one page that loads nothing and runs nothing.

Names in a report come from a model file that anybody may have made, so every one of them is escaped: by the template
(``html_page``), which escapes all but the drawings, and by the drawings themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flash_export import __version__, html_page
from flash_export.report_drawing import draw_graph
from flash_export.report_plots import bytes_text, error_histogram, memory_plot, seconds_bars, shares


def as_html(document: Mapping[str, Any]) -> str:
    """The page for ``document``, the content of a ``report.json`` of schema 1."""
    by_status: dict[str, list[Mapping[str, Any]]] = {"fused": [], "refused": [], "not_attention": []}
    for site in document["sites"]:
        by_status[site["status"]].append(site)
    check = document["check"]
    runs = check["runs"] if check else []
    example = document["example"]
    memory = example["memory"] if example else None
    return html_page.render(
        "flash_export",
        "report.html.j2",
        version=__version__,
        document=document,
        **by_status,
        compared=sum(run["passed"] is not None for run in runs),
        not_compared=[run for run in runs if run["note"]],
        warnings=check["warnings"] if check else [],
        worst_share=max((share for values in shares(runs).values() for share in values), default=None),
        example=example,
        before=draw_graph(example["before"], "before") if example else None,
        after=draw_graph(example["after"], "after") if example else None,
        memory=memory,
        memory_plot=memory_plot(memory) if memory else None,
        histogram=error_histogram(runs) if any(shares(runs).values()) else None,
        timings=seconds_bars(document["seconds"]),
        bytes_text=bytes_text,
    )
