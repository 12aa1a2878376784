# SPDX-License-Identifier: Apache-2.0
"""Attentions that are the same but for names: layers of a model, of which one run proves all.

A run of one depends on the two cuts, on what becomes of each boundary value, and on the lengths and contents that these
had; not on weights, which lie outside. Where all of that is equal, so is what a run of it can tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from flash_export.boundary import Boundary
from flash_export.captured import Seen
from flash_export.cut import cut
from flash_export.foreign_body import told
from flash_export.sites import Site

_LARGE_BYTES = 2**20
"""Contents of more than this are not compared: such a site is run for itself."""

_KINDS = ir.AttributeType
_TOLD = {_KINDS.INT, _KINDS.INTS, _KINDS.FLOAT, _KINDS.FLOATS, _KINDS.STRING, _KINDS.STRINGS, _KINDS.TENSOR}


def identity(
    site: Site, boundary: Boundary, plain: ir.Model, flash: ir.Model, *seen: Mapping[str, Seen]
) -> bytes | None:
    """What stands for all that ``check_site`` reads of ``site``, but for names; None where that cannot be told.

    Args:
        boundary: that of ``site``.
        plain: the unfused model in float32.
        flash: the fused one.
        seen: trial name -> what the boundary values were.
    """
    parts = [cut(model, site.boundary, [site.output]) for model in (plain, flash)]
    weights = [v.const_value for part in parts for v in part.graph.initializers.values() if v.const_value is not None]
    contents = [
        _content(trial, values[name], told=name in boundary.captured)
        for runs in seen
        for trial, values in runs.items()
        for name in boundary.names
    ]
    if sum(w.nbytes for w in weights) > _LARGE_BYTES or None in contents or not all(map(_is_told, parts)):
        return None
    facts: list[object] = [site.attributes, site.keys, boundary.squared, contents]
    for part in parts:
        inputs = [v.name or "" for v in part.graph.inputs]
        facts += [[(v.dtype, v.name in boundary.drawn, v.name in boundary.stretched) for v in part.graph.inputs]]
        facts += [[inputs.index(name) if name in inputs else -1 for name in boundary.names]]
        facts += [told(part.graph), [(f.identifier(), told(f)) for f in part.functions.values()]]
    return hashlib.sha256(repr(facts).encode()).digest()


def _is_told(part: ir.Model) -> bool:
    """Whether ``told`` has all of its nodes: it has no content of graphs and of lists of tensors."""
    nodes = [*part.graph, *(node for function in part.functions.values() for node in function)]
    return all(a.is_ref() or a.type in _TOLD for node in nodes for a in node.attributes.values())


def _content(trial: str, value: object, *, told: bool) -> tuple[object, ...] | None:
    """What ``check_site`` makes of a boundary value: its lengths alone where its content is not ``told``."""
    if isinstance(value, np.ndarray):
        if not told:
            return trial, value.shape
        small = value.nbytes <= _LARGE_BYTES
        return (trial, value.dtype, value.shape, value.tobytes()) if small and value.dtype != object else None
    return (trial, value) if isinstance(value, tuple) else None
