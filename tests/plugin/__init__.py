# SPDX-License-Identifier: Apache-2.0
"""Tests of the TensorRT plugin: its interface in C++, the library in NVIDIA's own registry, and its numbers."""
