# SPDX-License-Identifier: Apache-2.0
"""Modules that a test writes and imports, and the readers that they register: none of it stays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flash_export.patterns import PATTERNS


@contextmanager
def forgotten() -> Iterator[None]:
    """Afterwards the readers, the modules and the paths of modules are those of before."""
    patterns, modules, path = dict(PATTERNS), set(sys.modules), list(sys.path)
    yield
    PATTERNS.clear()
    PATTERNS.update(patterns)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
