# SPDX-License-Identifier: Apache-2.0
"""Runs models with FlashAttention nodes: TensorRT engines of them, and ONNX Runtime on a CPU."""

from flash_trt.cpu_operator import cpu_operator_path, session
from flash_trt.engine_session import EngineSession, open_engine

__all__ = ["EngineSession", "cpu_operator_path", "open_engine", "session"]
__version__ = "0.1.0"
