# SPDX-License-Identifier: Apache-2.0
"""What the text of a dynamic dim says of its length: ``2*n - 1`` and ``past + seq`` are computed from names."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

_LONGEST_DIM = 500
"""A dim with more characters is a name to us, and no expression."""

_HYPHENED = re.compile(r"[A-Za-z_]\w*(-[A-Za-z_]\w*)+")


def names_in(dim: str) -> list[str]:
    """The names in a dim such as ``past + seq``; the dim itself where it is no such expression.

    A word such as ``seq-len`` is a name: PyTorch puts spaces around a minus.
    """
    if len(dim) > _LONGEST_DIM or _HYPHENED.fullmatch(dim):
        return [dim]
    try:
        tree = ast.parse(dim, mode="eval")
    except (SyntaxError, ValueError):  # ValueError: NUL, in some versions of Python
        return [dim]
    known = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Constant, ast.Name, ast.Load)
    if not all(isinstance(node, known) for node in ast.walk(tree)):
        return [dim]
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)] or [dim]


def length_at(dim: str, sizes: Mapping[str, int]) -> int:
    """The size of ``past + seq``; a KeyError names what is missing."""
    if names_in(dim) == [dim]:
        return sizes[dim]

    def size(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp):
            left, right = size(node.left), size(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if right:
                return left // right
        raise KeyError(dim)

    return size(ast.parse(dim, mode="eval").body)
