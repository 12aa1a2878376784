# SPDX-License-Identifier: Apache-2.0
"""What was done, for tools (``report.json``, schema 1) and for people (a table on the terminal)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from flash_export.sites import Site

SCHEMA = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What a run knows before anything is written.

    Args:
        source: what was exported; ``source_kind`` what it turned out to be.
        sites: every softmax and attention operator.
        nodes: number of nodes before and after the rewrite.
        seconds: time a step; read when the report is made.
        example: ``report_example.as_json()``; None where nothing was rewritten.
    """

    source: Path
    source_kind: str
    sites: Sequence[Site]
    nodes: tuple[int, int]
    seconds: dict[str, float]
    example: dict[str, object] | None = None


def as_json(
    facts: Facts, output: Path | None, unfused: Path | None, check: dict[str, object] | None
) -> dict[str, object]:
    """The content of ``report.json``.

    Args:
        output: the fused model; None when nothing is written.
        unfused: the model to compare with; None when nothing is written.
        check: ``CheckResult.as_report()``; None when the check was left out.
    """
    return {
        "schema": SCHEMA,
        "source": str(facts.source),
        "source_kind": facts.source_kind,
        "output": str(output) if output else None,
        "unfused": str(unfused) if unfused else None,
        "sites": [site.as_report() | {"mask": mask_words(site)} for site in facts.sites],
        "fused": _count(facts.sites, "fused"),
        "refused": _count(facts.sites, "refused"),
        "nodes": {"before": facts.nodes[0], "after": facts.nodes[1]},
        "check": check,
        "example": facts.example,
        "seconds": dict(facts.seconds),
    }


def as_table(sites: Sequence[Site]) -> Table:
    """One row a site: what it is, or why it was left."""
    table = Table(title=_title(sites), title_justify="left")
    for header in ("attention", "status", "heads", "head dim", "mask", "scale"):
        table.add_column(header, overflow="fold")
    for site in sites:
        if site.status == "fused" and site.attributes is not None:
            table.add_row(*(escape(cell) for cell in _fused_row(site)))
        else:
            reason = f"{site.reason.code}: {site.reason.text} → {site.reason.action}" if site.reason else ""
            colour = "yellow" if site.status == "refused" else "dim"
            table.add_row(escape(site.name), f"[{colour}]{site.status}[/{colour}]", "", "", escape(reason), "")
    return table


def _fused_row(site: Site) -> tuple[str, ...]:
    a = site.attributes
    assert a is not None
    heads = str(a.q_num_heads) if a.q_num_heads == a.kv_num_heads else f"{a.q_num_heads}/{a.kv_num_heads}"
    dims = str(site.head_dim) if site.v_head_dim in (site.head_dim, None) else f"{site.head_dim}/{site.v_head_dim}"
    return site.name, "fused", heads, dims, mask_words(site) or "", f"{a.scale:.6g}"


def mask_words(site: Site) -> str | None:
    """The site's mask and extras in a few words, e.g. ``causal (top_left) + bias [B,1,1,S]``; None if not fused."""
    a = site.attributes
    if a is None:
        return None
    words = []
    if a.causal:
        words.append(f"causal ({a.causal_kind})")
    if a.window_left >= 0 or a.window_right >= 0:
        words.append(f"window {a.window_left},{a.window_right}")
    if a.has_bias:
        shape = ",".join("?" if dim is None else str(dim) for dim in site.bias_shape or [])
        words.append(f"bias [{shape}]")
    if a.has_kv_lengths:
        words.append("kv_lengths")
    if a.softcap:
        words.append(f"softcap {a.softcap:g}")
    if a.has_sinks:
        words.append("sinks")
    return " + ".join(words) or "none"


def _title(sites: Sequence[Site]) -> str:
    counts = Counter(site.status for site in sites)
    parts = [f"{counts['fused']} fused", f"{counts['refused']} refused"]
    if counts["not_attention"]:
        parts.append(f"{counts['not_attention']} not attention")
    return ", ".join(parts)


def _count(sites: Sequence[Site], status: str) -> int:
    return sum(site.status == status for site in sites)
