# SPDX-License-Identifier: Apache-2.0
"""What ``polygraphy plugin match`` is told by the ``pattern.py`` of each operator. The finder is flash-export's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import onnx_ir as ir

from flash_export.cut import CannotCut, attention_nodes, cut, reaches
from flash_export.errors import UsageError
from flash_export.find import find
from flash_export.op import DOMAIN
from flash_export.rewrite import rewrite
from flash_export.sites import Site


def pattern_of(
    operator: str,
) -> tuple[Callable[[], dict[str, str]], Callable[[Any], list[dict[str, Any]]], Callable[..., NoReturn]]:
    """The three functions of an operator's ``pattern.py``: its metadata, its matches, and a refusal to replace them."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise SystemExit(f"error: {refuse_to_replace()}")

    return lambda: {"name": operator, "op": operator}, lambda graph: matches(graph, operator), refuse


def matches(graph: Any, operator: str) -> list[dict[str, Any]]:
    """Every attention of ``graph`` (onnx-graphsurgeon's) that flash-export would fuse into a node of ``operator``.

    Each has the values that the node's inputs are computed from, in the operator's order, its output, and the
    attributes of its node. A node that stands there already is none, nor is what its function body holds.
    """
    import onnx_graphsurgeon

    model = ir.from_proto(onnx_graphsurgeon.export_onnx(graph, do_type_check=False))
    for identifier in [i for i, function in model.functions.items() if function.domain == DOMAIN]:
        del model.functions[identifier]
    there = {value.name for node in attention_nodes(model) for value in node.outputs}
    sites = [site for site in find(model) if site.status == "fused" and site.output not in there]
    rewrite(model, sites, fallback=False)
    return [
        {"inputs": _inputs(site, model), "outputs": [site.output], "attributes": site.attributes.as_dict()}
        for site in sites
        if site.operator == operator and site.attributes is not None
    ]


def _inputs(site: Site, fused: ir.Model) -> list[str]:
    """The part of the site's boundary that reaches an input of its node; a proven mask and a shape do not."""
    try:
        part = cut(fused, site.boundary, [site.output])
    except CannotCut:
        return list(site.boundary)
    reached = [reaches(value) for node in attention_nodes(part) for value in node.inputs]
    return list(dict.fromkeys(name for names in reached for name in site.boundary if name in names))


def refuse_to_replace() -> UsageError:
    """``polygraphy plugin replace`` would rewrite without proof."""
    return UsageError(
        "polygraphy plugin replace does not fuse attention",
        where="plugin replace",
        got="a request to rewrite the graph",
        need="a rewrite that is proven numerically",
        do="flash-export MODEL.onnx",
    )
