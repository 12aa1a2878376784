# SPDX-License-Identifier: Apache-2.0
"""Builds, compares and inspects TensorRT engines of models with FlashAttention nodes."""

__version__ = "0.1.0"
