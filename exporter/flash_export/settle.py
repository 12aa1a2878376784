# SPDX-License-Identifier: Apache-2.0
"""Which of the planned attentions can go, once it is known who else reads their scores, and what bounds each.

Liveness is computed on the graph as it would be afterwards: one attention may be all that another's scores are for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import Attention, Refused, name_of
from flash_export.drafts import is_draft
from flash_export.layout import size_of
from flash_export.plan import Plan, make_plan
from flash_export.region import Region
from flash_export.shape_reads import answered_elsewhere
from flash_export.sites import Refusal, Site


@dataclasses.dataclass(slots=True)
class Candidate:
    """An attention that has a plan."""

    site: Site
    attention: Attention
    plan: Plan


def refuse(site: Site, reason: Refusal, anchor: ir.Node) -> None:
    """Marks the site as refused, at the node of the reason or else at its anchor."""
    site.status = "refused"
    site.reason = reason if reason.node else dataclasses.replace(reason, node=name_of(anchor))
    site.match = None


def settle(graph: ir.Graph, candidates: list[Candidate], region: Region) -> None:
    """Refuses sites whose scores or probabilities somebody else needs, and fills in those that stay."""
    while True:
        live = _live_nodes(graph, (c.plan for c in candidates))
        still = [c for c in candidates if any(n in live for n in c.plan.nodes)]
        if not still:
            break
        still = [c for c in still if not _only_lengths_read(c, live, region)]
        refused = [c for c in still if not _ends_earlier(c, region)]
        for candidate in refused:
            _refuse_used(candidate, live)
        candidates = [c for c in candidates if c not in refused]
    for candidate in candidates:
        _fill(candidate, live)


def _live_nodes(graph: ir.Graph, plans: Iterable[Plan]) -> set[ir.Node]:
    """The nodes that the graph's outputs need once every plan's output comes from its new node."""
    replaced = {old: sources for plan in plans for old, sources in plan.replaced.items()}
    live: set[ir.Node] = set()
    stack = list(graph.outputs)
    seen: set[ir.Value] = set(stack)

    def push(values: Iterable[ir.Value]) -> None:
        for value in values:
            if value not in seen:
                seen.add(value)
                stack.append(value)

    while stack:
        value = stack.pop()
        if value in replaced:
            push(replaced[value])
            continue
        node = value.producer()
        if node is not None and node not in live:
            live.add(node)
            push(g.all_inputs(node))
    return live


def _only_lengths_read(candidate: Candidate, live: set[ir.Node], region: Region) -> bool:
    """Answers from Q and K whoever asks for the lengths of scores or probabilities that the site would leave."""
    answers = answered_elsewhere(candidate.attention, candidate.plan, live, region)
    candidate.attention.also.extend(answers)
    candidate.plan = dataclasses.replace(candidate.plan, also=(*candidate.plan.also, *answers))
    return bool(answers)


def _ends_earlier(candidate: Candidate, region: Region) -> bool:
    """Ends the node above where it did: somebody may have asked for the shape of a value in between."""
    tails = candidate.attention.tails
    count = [tail.value for tail in tails].index(candidate.plan.output)
    if count == 0:
        return False
    candidate.attention.tails = tails[:count]
    try:
        candidate.plan = make_plan(candidate.attention, region)
    except Refused:
        return False
    return True


def _refuse_used(candidate: Candidate, live: set[ir.Node]) -> None:
    """Refuses a site of which something stays that the node would take the place of."""
    remaining = [n for n in candidate.plan.nodes if n in live]
    after = candidate.plan.nodes.index(candidate.attention.anchor)
    late = any(candidate.plan.nodes.index(n) >= after for n in remaining)
    what = "probabilities" if late else "scores"
    outputs = g.for_outputs([v for node in remaining for v in node.outputs], candidate.plan.nodes)
    who = f"outside the attention{outputs}" if outputs else "by another node"
    reason = Refusal(
        f"{what}_used",
        f"the {what} are also read {who}; FlashAttention never forms them",
        name_of(remaining[0]),
        f"export the model so that nothing else reads the {what}",
    )
    refuse(candidate.site, reason, candidate.attention.anchor)


def _fill(candidate: Candidate, live: set[ir.Node]) -> None:
    site, plan = candidate.site, candidate.plan
    site.status = "fused"
    site.operator = plan.operator.name
    site.attributes = plan.attributes
    site.head_dim, site.v_head_dim = plan.head_dim, plan.v_head_dim
    site.bias_shape = plan.bias_shape
    site.keys = size_of(candidate.attention.columns).static
    site.output = str(plan.output.name)
    site.boundary = tuple(str(v.name) for v in _boundary(plan, live))
    if plan.nodes[0] is not candidate.attention.anchor:
        site.product = str(plan.nodes[0].outputs[0].name)
    if len(plan.operands) == 3:
        site.query_source = _source_name(plan.operands[0].value, site)
        site.key_source = _source_name(plan.operands[1].value, site)
    site.match = plan


def _source_name(value: ir.Value, site: Site) -> str | None:
    """The boundary value that ``value`` is, or is computed from alone."""
    while value.name not in site.boundary:
        node = value.producer()
        above = [] if node is None else [v for v in g.all_inputs(node) if not g.is_weight(v)]
        if len(above) != 1:
            return None
        (value,) = above
    return str(value.name)


def _boundary(plan: Plan, live: set[ir.Node]) -> list[ir.Value]:
    """The values that cut the site out of both graphs: the new node's sources, and what old shape arithmetic reads.

    Walks up from the output through everything that the rewrite removes, and stops at what it leaves. What lies on the
    way from one operand's source to its product is none, though another operand begin there: the two are not free of
    each other.
    """
    paths = {n for feed in plan.operands for n in feed.path}
    inner = {*plan.nodes, *paths}
    sources = _in_graph(plan.sources)
    between = [v for v in sources if v.producer() in paths]
    found = dict.fromkeys(v for v in sources if not g.is_weight(v) and v not in between)
    seen = {plan.output, *sources}
    stack = [plan.output, *between]
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None or (node in live and node not in inner):
            found[value] = None
            continue
        for above in g.all_inputs(node):
            if above not in seen and not g.is_weight(above):
                seen.add(above)
                stack.append(above)
    return list(found)


def _in_graph(values: Iterable[ir.Value]) -> list[ir.Value]:
    """The values of the graph that ``values`` are made from by drafts."""
    result: list[ir.Value] = []
    for value in values:
        node = value.producer()
        result.extend(_in_graph(g.all_inputs(node)) if node is not None and is_draft(value) else [value])
    return list(dict.fromkeys(result))
