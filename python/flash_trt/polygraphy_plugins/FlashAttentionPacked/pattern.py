# SPDX-License-Identifier: Apache-2.0
"""Where FlashAttentionPacked could stand in a graph, for ``polygraphy plugin match``, whose names these are."""

from flash_trt.polygraphy_matches import pattern_of

get_plugin_metadata, get_matching_subgraphs, replace_with_plugin = pattern_of("FlashAttentionPacked")
