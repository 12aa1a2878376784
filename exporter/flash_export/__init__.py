# SPDX-License-Identifier: Apache-2.0
"""Exports PyTorch transformers to ONNX with every attention fused into one FlashAttention operator."""

__version__ = "0.1.0"
