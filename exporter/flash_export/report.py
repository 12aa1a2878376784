# SPDX-License-Identifier: Apache-2.0
"""What was done, for tools (``report.json``, schema 1) and for people (a table on the terminal)."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flash_export.save import Saved, unfused_path
from flash_export.sites import Site
from flash_export.talk import plain

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


def as_table(sites: Sequence[Site]) -> RenderableType:
    """One row a site, then each reason for a refusal once; only the counts where there is nothing to list."""
    if not sites:
        return Text(_title(sites))
    table = Table(title=_title(sites), title_justify="left")
    for header in ("attention", "status", "heads", "head dim", "mask", "scale"):
        table.add_column(header, overflow="fold")
    for site in sites:
        if site.status == "fused" and site.attributes is not None:
            table.add_row(*(plain(cell) for cell in _fused_row(site)))
        else:
            colour = "yellow" if site.status == "refused" else "dim"
            code = site.reason.code if site.reason else ""
            table.add_row(plain(site.name), f"[{colour}]{site.status}[/{colour}]", "", "", code, "")
    return Group(table, *_reasons(sites))


def _reasons(sites: Sequence[Site]) -> list[str]:
    """Each distinct reason with the number of sites it stands for, where (but at the softmax itself) and what to do."""
    nodes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for site in sites:
        if site.status == "refused" and (reason := site.reason) is not None:
            nodes[reason.code, reason.text, reason.action].append("" if reason.node == site.name else reason.node)
    return [
        f"[yellow]{code}[/yellow] ({len(at)} x): {plain(text)}\n{_where(at)}  do: {plain(action)}"
        for (code, text, action), at in nodes.items()
    ]


def _where(nodes: Sequence[str]) -> str:
    if not nodes[0]:
        return ""
    more = len(set(nodes)) - 1
    return f"  at: {plain(nodes[0])}" + (f", and {more} more" if more else "") + "\n"


def as_summary(saved: Saved, sites: Sequence[Site], check: Mapping[str, object] | None) -> str:
    """What was proven and where the files are, one line each."""
    lines = []
    already = sum(site.already and site.status == "fused" for site in sites)
    if nothing_new(sites):
        lines.append("changed  nothing: no attention was fused that was not a FlashAttention node already")
    elif not _count(sites, "fused"):
        lines.append("changed  nothing: no attention was fused, the output computes the model as it was")
    elif check is not None and check["max_abs_error"] is not None:
        runs = [run for run in cast("list[dict[str, object]]", check["runs"]) if run["passed"]]
        error, allowed = check["max_abs_error"], check["tolerance"]
        lines.append(f"proven   in {len(runs)} comparisons; the closest: off by {error:.2g}, {allowed:.2g} allowed")
    within = f"; {already} of its attentions fused already" if already else ""
    source = "" if saved.unfused == unfused_path(saved.output) else f"  (the source itself{within})"
    lines += [
        f"{'fused ' if _count(sites, 'fused') else 'output'}   {saved.output}",
        f"{'source ' if nothing_new(sites) else 'unfused'}  {saved.unfused}{source}",
        f"report   {saved.report}",
    ]
    return "\n".join(lines)


def nothing_new(sites: Sequence[Site]) -> bool:
    """Whether all that is fused, and something is, was a FlashAttention node in the source."""
    fused = [site for site in sites if site.status == "fused"]
    return bool(fused) and all(site.already for site in fused)


def _fused_row(site: Site) -> tuple[str, ...]:
    a = site.attributes
    assert a is not None
    heads = str(a.q_num_heads) if a.q_num_heads == a.kv_num_heads else f"{a.q_num_heads}/{a.kv_num_heads}"
    dims = str(site.head_dim) if site.v_head_dim in (site.head_dim, None) else f"{site.head_dim}/{site.v_head_dim}"
    return (
        site.name,
        "fused already" if site.already else "fused",
        heads,
        dims,
        mask_words(site) or "",
        f"{a.scale:.6g}",
    )


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
        shape = None if site.bias_shape is None else ",".join("?" if d is None else str(d) for d in site.bias_shape)
        words.append("bias" if shape is None else f"bias [{shape}]")
    if a.has_kv_lengths:
        words.append("kv_lengths")
    if a.softcap:
        words.append(f"softcap {a.softcap:g}")
    if a.has_sinks:
        words.append("sinks")
    return " + ".join(words) or "none"


def _title(sites: Sequence[Site]) -> str:
    counts = Counter(site.status for site in sites)
    already = sum(site.already and site.status == "fused" for site in sites)
    parts = [
        f"{counts['fused']} fused" + (f" ({already} of them already)" if already else ""),
        f"{counts['refused']} refused",
    ]
    if counts["not_attention"]:
        parts.append(f"{counts['not_attention']} not attention")
    return ", ".join(parts)


def _count(sites: Sequence[Site], status: str) -> int:
    return sum(site.status == status for site in sites)
