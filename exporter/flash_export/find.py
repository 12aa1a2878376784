# SPDX-License-Identifier: Apache-2.0
"""Finds every softmax and attention operator of a model and says what becomes of it.

Anchors are operators, never names or model types. Each anchor ends as ``fused``, ``refused`` with a reason, or
``not_attention``; see ``docs/finding.md``.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import onnx_ir as ir

from flash_export import graph as g
from flash_export.canonical import NoAnchor, NotAttention, Refused, name_of
from flash_export.drafts import Drafts
from flash_export.evaluate import Evaluator
from flash_export.feeds import named
from flash_export.foreign_body import foreign_bodies
from flash_export.inline import CannotInline, inline, inline_near
from flash_export.op import DOMAIN, FLOAT_ATTRIBUTES, INT_ATTRIBUTES, OPERATORS, Attributes
from flash_export.own_reader import Reader, read_and_plan
from flash_export.patterns import PATTERNS, WRITTEN_OUT
from flash_export.patterns.branches import place
from flash_export.read_twice import separate
from flash_export.region import Region
from flash_export.settle import Candidate, refuse, settle
from flash_export.shapes import Shapes
from flash_export.sites import Refusal, Site
from flash_export.value_types import infer

_ORIGIN = "flash_export.origin"
"""Where a node keeps, in memory, the number that it has in the file."""


def find(model: ir.Model) -> list[Site]:
    """One site for every softmax and attention operator, in the graph's order; unnamed values get names.

    Local functions with attention, or parts of it, become part of the main graph where that lets something fuse.
    Sites inside subgraphs and other functions come after those of the main graph and are never fused. A softmax that
    several products read is written once for each, where that lets all of them fuse.
    """
    sites = _find_inlined(model)
    shared = {s.name for s in sites if s.reason is not None and s.reason.code == "probabilities_used"}
    trial = model.clone() if shared else model
    copies = separate(trial.graph, shared) if shared else {}
    fused = {s.name for s in _find(trial) if s.status == "fused"} if copies else set()
    kept = [name for name, more in copies.items() if fused.issuperset((name, *more))]
    if not kept:
        return sites
    separate(model.graph, kept)
    reasons = {s.name: s.reason for s in sites}
    sites = _find(model)
    for site in sites:
        if site.status == "refused":
            site.reason = reasons.get(site.name, site.reason)
    return sites


def _find_inlined(model: ir.Model) -> list[Site]:
    """``find``, but for what several products read."""
    if all(function.domain == DOMAIN for function in model.functions.values()):
        return _find(model)
    _mark(model)
    trial = model.clone()
    try:
        changed = inline(trial, PATTERNS)
    except CannotInline as error:
        return _find(model, str(error))
    before = _find(model)
    tried = _find(trial) if changed else before
    steps = 1 if _fused(tried) > _fused(before) else 0
    if _fused(tried) < len(tried) and _inlined_near(trial):
        near = _find(trial)
        steps = 2 if _fused(near) > _fused(tried) else steps
        tried = near
    for step in (inline, inline_near)[:steps]:
        step(model, PATTERNS)
    sites = _find(model) if steps else before
    _explain(sites, tried)
    return sites


def _inlined_near(model: ir.Model) -> bool:
    try:
        return inline_near(model, PATTERNS)
    except CannotInline:
        return False


def _fused(sites: list[Site]) -> int:
    return sum(site.status == "fused" for site in sites)


def _mark(model: ir.Model) -> None:
    """Numbers the anchors, those in functions too; a node that is written out for a call has its number."""
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for number, node in enumerate(node for graph in graphs for node in graph.all_nodes()):
        if _reader(node) is not None:
            node.meta[_ORIGIN] = number


def _explain(sites: list[Site], inlined: list[Site]) -> None:
    """Gives the sites that stay the reasons that they have where the calls around them are written out."""
    written: dict[int | None, list[Site]] = defaultdict(list)
    told: dict[int | None, list[Site]] = defaultdict(list)
    for group, members in ((written, inlined), (told, sites)):
        for site in members:
            group[site.origin].append(site)
    for origin, same in told.items():
        others = written[origin]
        first = next((s.reason for s in others if s.reason is not None), None)
        # One node of a function is a node at every call: there any reason holds.
        reasons = [s.reason for s in others] if len(others) == len(same) else [first] * len(same)
        for site, reason in zip(same, reasons, strict=True):
            if site.status != "fused" and reason is not None and origin is not None:
                node = reason.node if site.reason == reason else site.name
                site.status, site.reason = "refused", dataclasses.replace(reason, node=node)


def _find(model: ir.Model, not_inlined: str = "") -> list[Site]:
    opset = model.opset_imports.get("", 1)
    g.ensure_names(model.graph)
    region = _region(model.graph, opset, None)
    if region.shapes.unknown:
        region = _region(model.graph, opset, None, _inferred(model))
    sites: list[Site] = []
    candidates: list[Candidate] = []
    for node in model.graph:
        found = _visit(node, region)
        if found is None:
            continue
        sites.append(found if isinstance(found, Site) else found.site)
        if isinstance(found, Candidate):
            candidates.append(found)
    foreign = foreign_bodies(model, region.shapes)
    for site in sites:
        if site.status == "fused" and site.operator in foreign:
            _refuse_foreign(site, str(site.operator))
    for candidate in candidates:
        if candidate.plan.operator.name in foreign:
            _refuse_foreign(candidate.site, candidate.plan.operator.name)
    settle(model.graph, [c for c in candidates if c.site.status != "refused"], region)
    sites.extend(_inner_sites(model, region, not_inlined))
    _name_apart(sites)
    return sites


def _inferred(model: ir.Model) -> dict[str, ir.TypeAndShape]:
    """What onnx's shape inference says of values for which neither the file nor our own rules know a shape."""
    copy = model.clone()
    infer(copy, check_type=False, strict_mode=False)
    return {str(v.name): ir.TypeAndShape(v.type, v.shape) for node in copy.graph for v in node.outputs}


def _region(
    graph: ir.Graph | ir.Function,
    opset: int,
    outer: Region | None,
    inferred: dict[str, ir.TypeAndShape] | None = None,
    owner: ir.Node | None = None,
) -> Region:
    shapes = Shapes(graph, None if outer is None else outer.shapes, inferred)
    owners = () if outer is None or owner is None else (owner, *outer.owners)
    return Region(shapes, Evaluator(shapes, opset), opset, Drafts(shapes, opset), owners=owners)


def _visit(node: ir.Node, region: Region) -> Site | Candidate | None:
    if node.domain == DOMAIN and node.op_type in OPERATORS:
        return _existing(node, region)
    reader = _reader(node)
    if reader is None:
        return None
    site = Site(name=name_of(node), status="not_attention", origin=node.meta.get(_ORIGIN))
    mark = region.drafts.mark()
    try:
        return Candidate(site, *read_and_plan(reader, node, region))
    except NoAnchor:
        return None
    except NotAttention:
        region.drafts.discard(mark)
        return site
    except Refused as error:
        region.drafts.discard(mark)
        refuse(site, error.reason, node)
        return site
    except RecursionError:
        # Readers call themselves for each node above the anchor, as expressions of attention are tens of nodes deep.
        region.drafts.discard(mark)
        refuse(site, _TOO_DEEP, node)
        return site


def _reader(node: ir.Node) -> Reader | None:
    """Who reads the attention around ``node``; None where it is no anchor."""
    operator = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
    return PATTERNS.get(operator) or WRITTEN_OUT.get(operator)


_TOO_DEEP = Refusal(
    "too_deep",
    "hundreds of operators follow one another between the products and the softmax, or make the mask",
    "",
    "simplify the graph first (onnxsim, onnxslim), or leave this attention in standard operators",
)


def _existing(node: ir.Node, region: Region) -> Site:
    """A FlashAttention node that is there already: found, with nothing to do."""
    names = INT_ATTRIBUTES | FLOAT_ATTRIBUTES
    written = {n: node.attributes[n].value for n in names if n in node.attributes}
    output = str(node.outputs[0].name)
    site = Site(name=name_of(node), status="fused", operator=node.op_type, output=output, already=True)
    try:
        site.attributes = Attributes(**written)
    except (TypeError, ValueError) as error:
        reason = Refusal("bad_node", f"the node's attributes: {error}", name_of(node), "export the model again")
        refuse(site, reason, node)
        return site
    shape = region.shapes.shape(node.inputs[0])
    if shape is not None and shape[-1].static is not None and node.op_type != "FlashAttentionPacked":
        heads = 1 if site.attributes.layout else site.attributes.q_num_heads
        site.head_dim = shape[-1].static // heads
    bias = g.input_of(node, 3) if site.attributes.has_bias else None
    bias_shape = None if bias is None else region.shapes.shape(bias)
    site.bias_shape = None if bias_shape is None else named(bias_shape)
    site.boundary = tuple(str(v.name) for v in node.inputs if v is not None and not g.is_weight(v))
    return site


def _refuse_foreign(site: Site, operator: str) -> None:
    """Refuses a node that a runtime without the plugin would compute by a body of the file's own."""
    site.status = "refused"
    site.reason = Refusal(
        "foreign_body",
        f"the file gives {operator} a body that is not flash-export's; the plugin computes attention",
        site.name,
        "export the original model again",
    )


def _inner_sites(model: ir.Model, region: Region, not_inlined: str) -> Iterator[Site]:
    yield from _sites_below(model.graph, region)
    for function in _called(model):
        if function.domain != DOMAIN and (function.domain, function.name) not in PATTERNS:
            inner = _region(function, function.opset_imports.get("", region.opset), None)
            why = f", which cannot become part of the graph: {not_inlined}" if not_inlined else ""
            reason = Refusal(
                "subgraph",
                f"the attention lies in the local function {function.name}{why}",
                "",
                "inline the functions (onnx.inliner, at one opset), then export again",
            )
            for site in _subgraph_sites(function, inner, reason):
                if not_inlined and site.status == "refused":
                    # What a function by itself does not tell, such as the ranks of its inputs, is no reason.
                    site.reason = dataclasses.replace(reason, node=site.name)
                yield site


def _called(model: ir.Model) -> list[ir.Function]:
    """The functions that run when the model does, in the file's order."""
    called: set[ir.OperatorIdentifier] = set()
    todo = [*model.graph.all_nodes()]
    while todo:
        identifier = todo.pop().op_identifier()
        if identifier in model.functions and identifier not in called:
            called.add(identifier)
            todo.extend(model.functions[identifier].all_nodes())
    return [function for identifier, function in model.functions.items() if identifier in called]


def _sites_below(graph: ir.Graph | ir.Function, region: Region) -> Iterator[Site]:
    """The sites in the branches and bodies of the graph's nodes."""
    for node in graph:
        for attribute in node.attributes.values():
            for inner in g.graphs_of(attribute):
                yield from _subgraph_sites(inner, _region(inner, region.opset, region, owner=node), _inside(node))


def _inside(node: ir.Node) -> Refusal:
    """Why attention in a branch or a body stays."""
    what, action = place(node)
    text = f"the attention lies in {what}, where nobody can feed it to prove a rewrite"
    return Refusal("subgraph", text, "", action)


def _subgraph_sites(graph: ir.Graph | ir.Function, region: Region, reason: Refusal) -> Iterator[Site]:
    for node in graph:
        found = _visit(node, region)
        if isinstance(found, Site):
            if found.reason is not None and found.reason.code == "rank_unknown":
                refuse(found, reason, node)  # nor would it be fused if the ranks of the body's inputs were known
            yield found
        elif found is not None:
            refuse(found.site, reason, node)
            yield found.site
    yield from _sites_below(graph, region)


def _name_apart(sites: list[Site]) -> None:
    """Makes the names unique: ``--skip`` and reports address a site by its name."""
    taken: set[str] = set()
    for site in sites:
        name, number = site.name, 1
        while name in taken:
            number += 1
            name = f"{site.name}#{number}"
        taken.add(name)
        site.name = name
