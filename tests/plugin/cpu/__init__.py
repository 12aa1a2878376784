# SPDX-License-Identifier: Apache-2.0
"""Tests of the operator on a CPU: its kernels, and its library in ONNX Runtime."""
