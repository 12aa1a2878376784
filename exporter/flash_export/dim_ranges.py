# SPDX-License-Identifier: Apache-2.0
"""What an ONNX file says of its dynamic dimensions beyond their names: the range in which the model works.

ONNX has no place for it, so it is a metadata property, ``flash_export.dims``, a JSON object such as
``{"batch": [1, null], "seq": [1, 128]}``: smallest and largest size, null where nothing limits it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import onnx

from flash_export.inputs import MAX_DIM

PROPERTY = "flash_export.dims"

Ranges = dict[str, tuple[int, int]]
"""Dimension -> smallest and largest size; ``MAX_DIM`` where nothing limits it."""


def write(path: Path, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Writes ``ranges`` into the file at ``path``; weights in other files are not touched."""
    model = onnx.load(path, format="protobuf", load_external_data=False)
    text = json.dumps({name: [low, None if high >= MAX_DIM else high] for name, (low, high) in ranges.items()})
    kept = {entry.key: entry.value for entry in model.metadata_props}
    onnx.helper.set_model_props(model, kept | {PROPERTY: text})
    path.write_bytes(model.SerializeToString())


def read(model: onnx.ModelProto) -> Ranges:
    """The ranges that a file has; what is no range of a dimension, as a stranger may write, is passed over."""
    return parse(next((entry.value for entry in model.metadata_props if entry.key == PROPERTY), "{}"))


def parse(text: str) -> Ranges:
    """The ranges in the text of the property; see ``read``."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    ranges = {}
    for name, limits in found.items() if isinstance(found, dict) else ():
        if isinstance(limits, list) and len(limits) == 2:
            low, high = limits[0], MAX_DIM if limits[1] is None else limits[1]
            if type(low) is int and type(high) is int and 0 <= low <= high <= MAX_DIM:
                ranges[name] = (low, high)
    return ranges


def spell(limits: tuple[int, int]) -> str:
    """``1..128``, as ``--input`` spells it; ``1..`` where nothing limits it."""
    low, high = limits
    return f"{low}..{high if high < MAX_DIM else ''}"
