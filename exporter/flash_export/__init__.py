# SPDX-License-Identifier: Apache-2.0
"""Exports PyTorch transformers to ONNX with every attention fused into one FlashAttention operator.

``export`` and ``rewrite`` are the command as functions (docs/api.md). They are imported when first used.
"""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False  # typing's own takes longer to import than all else here

if TYPE_CHECKING:
    from flash_export.api import Result, export, rewrite

__all__ = ["Result", "__version__", "export", "rewrite"]
__version__ = "0.1.0"


class _Package(ModuleType):
    """Two functions bear the names of the steps they go through: importing a step does not hide its function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in ("export", "rewrite") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in ("Result", "export", "rewrite"):
        from flash_export import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
