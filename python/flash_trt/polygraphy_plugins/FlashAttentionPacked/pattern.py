# SPDX-License-Identifier: Apache-2.0
"""Where FlashAttentionPacked could stand in a graph, for ``polygraphy plugin match``."""

from __future__ import annotations

from typing import Any

from flash_trt import polygraphy_matches

OPERATOR = "FlashAttentionPacked"


def get_plugin_metadata() -> dict[str, str]:
    """The plugin's name, and the operator that stands for it."""
    return {"name": OPERATOR, "op": OPERATOR}


def get_matching_subgraphs(graph: Any) -> list[dict[str, Any]]:
    """See ``polygraphy_matches.matches``."""
    return polygraphy_matches.matches(graph, OPERATOR)


def replace_with_plugin(*_: object, **__: object) -> bool:
    """``polygraphy plugin replace`` is refused: it would rewrite without proof."""
    raise SystemExit(f"error: {polygraphy_matches.refuse_to_replace()}")
