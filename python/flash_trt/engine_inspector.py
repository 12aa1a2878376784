# SPDX-License-Identifier: Apache-2.0
"""What TensorRT's own engine inspector says of an engine: it asks a loaded one, so it needs a GPU, and trust."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from flash_export.errors import UserError
from flash_trt import engine_load, gpu
from flash_trt.attention import Attention, from_layers
from flash_trt.byte_sizes import spell_bytes
from flash_trt.output import alone_in, sidecar_path, write_atomically
from flash_trt.plugin_library import sha256_of


def ask(path: Path, *, trusted: bool = False) -> dict[str, Any]:
    """``layers`` as TensorRT tells them and ``device_memory_bytes``; or both None, with ``why`` in words.

    A layer is an object (of an engine built with detailed profiling, as ``flash-trt build`` does) or a name. Nothing is
    loaded that the sidecar does not vouch for, unless ``trusted``: an engine is code.
    """
    try:
        loaded = engine_load.load(path, trusted=trusted)
    except UserError as error:
        return {"layers": None, "device_memory_bytes": None, "why": f"{error.what}: {error.got}"}
    form = loaded.backend.trt.LayerInformationFormat.JSON
    text = loaded.engine.create_engine_inspector().get_engine_information(form)
    memory = getattr(loaded.engine, "device_memory_size_v2", None)  # gone or new, by version
    try:
        layers = json.loads(text)["Layers"]
    except (ValueError, KeyError, TypeError):
        return {"layers": None, "device_memory_bytes": memory, "why": f"its answer cannot be read: {text[:200]!r}"}
    return {"layers": layers, "device_memory_bytes": memory, "why": None}


def complete(engine: Path, sidecar: dict[str, Any]) -> None:
    """Puts into ``sidecar``, of an engine just built here, who computes the attentions of which its plan tells nothing.

    Asks nobody where the plan told all, or no GPU is here.
    """
    found = [Attention(**entry) for entry in sidecar["attention"]]
    if not gpu.devices() or all(attention.by != "not_told" for attention in found):
        return
    layers = ask(engine)["layers"] or []
    asked = [from_layers(attention, layers) for attention in found]
    if asked != found:
        sidecar["attention"] = [attention.as_json() for attention in asked]
        with alone_in(engine.parent):
            if sha256_of(engine) == sidecar["engine"]["sha256"]:  # else another build has replaced it since
                write_atomically(sidecar_path(engine), json.dumps(sidecar, indent=2).encode() + b"\n")


def as_rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for people: how many layers of which type, and the memory of one context."""
    if told["layers"] is None:
        return [("engine inspector", f"tells nothing here: {told['why']}")]
    kinds = Counter(
        str(layer.get("LayerType", "of no type told")) if isinstance(layer, dict) else "named only"
        for layer in told["layers"]
    )
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"
    rows = [("engine inspector", f"{len(told['layers'])} layers: {counted}")]
    if told["device_memory_bytes"] is not None:
        rows.append(("memory of a context", spell_bytes(told["device_memory_bytes"])))
    return rows
