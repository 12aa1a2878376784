# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes as people read them."""

from __future__ import annotations


def spell_bytes(size: int) -> str:
    """``0 bytes``, ``716 bytes``, ``3.2 KiB``, ``8.75 MiB``: no size above 0 is spelled as 0."""
    if size < 2**10:
        return f"{size} byte{'' if size == 1 else 's'}"
    return f"{size / 2**10:.1f} KiB" if size < 2**20 else f"{size / 2**20:.2f} MiB"
