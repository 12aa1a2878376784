# SPDX-License-Identifier: Apache-2.0
"""What ``polygraphy plugin match`` asks of a plugin: where it could stand in a graph. The finder is flash-export's."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from flash_export.find import find


def get_plugin_metadata() -> dict[str, str]:
    """The plugin's name, and the operator that stands for it."""
    return {"name": "FlashAttention", "op": "FlashAttention"}


def get_matching_subgraphs(graph: Any) -> list[dict[str, Any]]:
    """Every attention of ``graph`` (onnx-graphsurgeon's) that flash-export fuses, or has fused already.

    Each has the names of the values at its edge, its output, and the attributes of its node.
    """
    import onnx_graphsurgeon

    model = ir.from_proto(onnx_graphsurgeon.export_onnx(graph, do_type_check=False))
    return [
        {"inputs": list(site.boundary), "outputs": [site.output], "attributes": site.attributes.as_dict()}
        for site in find(model)
        if site.status == "fused" and site.attributes is not None
    ]


def replace_with_plugin(*_: object, **__: object) -> bool:
    """``polygraphy plugin replace`` is refused: it would rewrite without proof."""
    raise SystemExit(
        "error: polygraphy plugin replace does not fuse attention\n"
        "  where FlashAttention/pattern.py\n"
        "  got   a request to rewrite the graph\n"
        "  need  a rewrite that is proven numerically\n"
        "  do    flash-export MODEL.onnx"
    )
