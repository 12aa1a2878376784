# SPDX-License-Identifier: Apache-2.0
"""Small ONNX files, written as text, for tests of the whole command."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser

HEADER = '<ir_version: 9, opset_import: ["" : 18]>\n'

ATTENTION = (
    HEADER
    + """
attention (float[B, 3, S, 16] q, float[B, 3, T, 16] k, float[B, 3, T, 16] v) => (float[B, 3, S, 16] out)
<float scale = {0.25}>
{
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q, kt)
  scaled = Mul (scores, scale)
  probs = Softmax <axis = -1> (scaled)
  out = MatMul (probs, v)
}
"""
)

TWO_ATTENTIONS_ONE_REFUSED = (
    HEADER
    + """
attention (float[B, 3, S, 16] q, float[B, 3, T, 16] k, float[B, 3, T, 16] v)
  => (float[B, 3, S, 16] out, float[B, 3, S, 16] other, float[B, 3, S, T] used)
<float scale = {0.25}>
{
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q, kt)
  scaled = Mul (scores, scale)
  probs = Softmax <axis = -1> (scaled)
  out = MatMul (probs, v)
  other_scores = MatMul (q, kt)
  other_scaled = Mul (other_scores, scale)
  used = Softmax <axis = -1> (other_scaled)
  other = MatMul (used, v)
}
"""
)

CLASSIFIER = (
    HEADER
    + """
classifier (float[B, 8] x) => (float[B, 8] y) { y = Softmax <axis = -1> (x) }
"""
)


def write(text: str, path: Path) -> Path:
    """Parses ``text``, checks it and writes it to ``path``."""
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path
