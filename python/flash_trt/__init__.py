# SPDX-License-Identifier: Apache-2.0
"""Runs models with FlashAttention nodes: TensorRT engines of them, and ONNX Runtime on a CPU.

What is here is imported when first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than all else here

if TYPE_CHECKING:
    from flash_trt.cpu_operator import cpu_operator_path, session
    from flash_trt.engine_session import EngineSession, open_engine, why_not_here

__all__ = ["EngineSession", "cpu_operator_path", "open_engine", "session", "why_not_here"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in ("cpu_operator_path", "session"):
        from flash_trt import cpu_operator

        return getattr(cpu_operator, name)
    if name in ("EngineSession", "open_engine", "why_not_here"):
        from flash_trt import engine_session

        return getattr(engine_session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
