# SPDX-License-Identifier: Apache-2.0
"""Which sites a pattern of the user's own has made: what is to be done about those, its module can do."""

from __future__ import annotations

import functools

from flash_export.own_reader import root_of
from flash_export.patterns import PATTERNS
from flash_export.plan import Plan
from flash_export.sites import Site


def pattern_of(site: Site) -> str:
    """The module of the user's own whose reader has read a fused ``site``; "" where a pattern of ours has."""
    if not isinstance(site.match, Plan):
        return ""
    anchor = site.match.anchor
    reader: object = PATTERNS.get((anchor.domain, anchor.op_type))
    if reader is None or root_of(reader) == __package__:
        return ""
    while isinstance(reader, functools.partial):
        reader = reader.func
    return str(getattr(reader, "__module__", None) or "a module of your own")
