# SPDX-License-Identifier: Apache-2.0
"""What an engine, its sidecar or an ONNX file holds, read from its bytes without a GPU.

Where an engine can be loaded, TensorRT's engine inspector is asked too.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from flash_export import dim_ranges, regular_file
from flash_export.errors import UsageError
from flash_export.op import FLOAT_ATTRIBUTES, INT_ATTRIBUTES
from flash_trt import engine_file, engine_inspector, lengths, onnx_file, plan, plan_program
from flash_trt.attention import attention_rows
from flash_trt.byte_sizes import spell_bytes
from flash_trt.plugin_library import sha256_of


def inspect(path: Path, *, trusted: bool = False) -> dict[str, Any]:
    """Everything ``flash-trt inspect`` prints of an engine, of its sidecar (the engine beside it), or of an ONNX file.

    Only ``engine_inspector`` loads an engine; ``trusted`` is for it.

    Raises:
        UsageError: ``path`` is none of these.
        UnsafeInput, UnsupportedModel: an ONNX file that ``flash_trt.onnx_file`` refuses.
    """
    if engine_file.is_engine(path):
        return _engine(path, trusted)
    if _is_json(path):
        engine = path.with_suffix("")
        if engine_file.is_engine(engine):
            return _engine(engine, trusted)
        if not _is_sidecar(path):
            raise UsageError(
                "this JSON is no sidecar of an engine",
                where=str(path),
                got="no key 'engine' in it, or no JSON after all",
                need="an engine, the NAME.engine.json beside it, or an ONNX file",
                do="give one of these; what flash-export, compare and bench write as JSON is read by any JSON reader",
            )
        raise UsageError(
            "the engine that this sidecar describes is not beside it",
            where=str(path),
            got=f"no TensorRT plan at {engine}",
            need="NAME.engine beside NAME.engine.json",
            do="put the two side by side, as flash-trt build wrote them",
        )
    return _onnx(path)


def _is_json(path: Path) -> bool:
    """Whether ``path`` begins as a sidecar does, an object, or is text that is called JSON; ONNX is neither."""
    try:
        head = regular_file.head(path, 64)
    except OSError:
        return False  # reading it as ONNX says what is wrong
    is_text = all(chr(byte).isprintable() or chr(byte).isspace() for byte in head) and head.isascii()
    return head.lstrip().startswith(b"{") or (path.suffix == ".json" and is_text)


def _is_sidecar(path: Path) -> bool:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "engine" in document


def _engine(path: Path, trusted: bool) -> dict[str, Any]:
    engine = engine_file.read(path)
    data = path.read_bytes()
    digest = sha256_of(path)
    described = engine.sidecar.get("engine")
    expected = described.get("sha256") if isinstance(described, dict) else None
    kernels = Counter(launch.kernel for launch in plan_program.launches(data))
    return {
        "kind": "engine",
        "file": str(path),
        "bytes": len(data),
        "sha256": digest,
        "trusted": expected == digest,
        "sidecar": engine.sidecar or None,
        "profiles": engine.profiles,
        "plugins": [_plugin(record) for record in plan.plugin_records(data)],
        "tensorrt_fused_attention": sum(
            n for kernel, n in kernels.items() if kernel.startswith(plan_program.FUSED_ATTENTION)
        ),
        "inspector": engine_inspector.ask(path, trusted=trusted),
    }


def _plugin(record: plan.PluginRecord) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, raw in record.fields.items():
        if name in INT_ATTRIBUTES | FLOAT_ATTRIBUTES and len(raw) == 4:
            (values[name],) = struct.unpack("<f" if name in FLOAT_ATTRIBUTES else "<i", raw)
    return {"operator": record.operator, "version": record.version, "attributes": values}


def _onnx(path: Path) -> dict[str, Any]:
    file = onnx_file.read(path)
    return {
        "kind": "onnx",
        "file": str(path),
        "bytes": path.stat().st_size,
        "sha256": sha256_of(path),
        "inputs": {i.name: lengths.spell_dims(i) for i in file.inputs},
        "dims": {name: dim_ranges.spell(limits) for name, limits in file.dim_ranges.items()},
        "outputs": file.outputs,
        "opsets": {opset.domain or "ai.onnx": opset.version for opset in file.proto.opset_import},
        "nodes": [
            {"name": node.name, "operator": node.operator, "attributes": node.attributes} for node in file.flash_nodes
        ],
        "bodies": sorted({f.name for f in file.proto.functions if f.name in {n.operator for n in file.flash_nodes}}),
    }


_PROOFS = {
    "fields": "the plan holds every FlashAttention node with its attributes",
    "names": "the plan holds the names of the operators; its form of their attributes is not known here",
}


# --- for people -------------------------------------------------------------------------------------------------------


def as_lines(found: dict[str, Any]) -> list[str]:
    """The same as aligned ``name  value`` lines, one attention a line at the end."""
    rows = [("file", f"{found['file']}  ({spell_bytes(found['bytes'])})"), ("sha256", found["sha256"])]
    rows += _engine_rows(found) if found["kind"] == "engine" else _onnx_rows(found)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _engine_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    sidecar = found["sidecar"] or {}
    changed = "NOT its sidecar's: the engine, or the sidecar, is another than was built"
    trust = "its sidecar's" if found["trusted"] else changed if sidecar else "there is no sidecar that can be read"
    rows = [("hash", trust)]
    for key in ("backend", "targets", "gpu", "built"):
        if sidecar.get(key) is not None:
            rows.append((key, _spell(sidecar[key])))
    rows += _facts(sidecar) if found["trusted"] else []
    profiles = found["profiles"]
    for number, profile in enumerate(profiles):
        of = f"profile {number}, " if len(profiles) > 1 else ""
        rows += [(f"{of}shape {name}", _spell(limits)) for name, limits in profile.items()]
    counted = Counter(_describe(plugin) for plugin in found["plugins"])
    rows += [(f"plugin x{count}", text) for text, count in counted.items()] or [("plugin", "none of ours")]
    rows.append(("TensorRT's own fused", f"{found['tensorrt_fused_attention']} attention kernels in the plan"))
    return rows + engine_inspector.as_rows(found["inspector"])


def _facts(sidecar: dict[str, Any]) -> list[tuple[str, str]]:
    """What ``flash-trt build`` said at its end; a stranger's sidecar of another form says nothing."""
    rows = []
    if isinstance(scratch := sidecar.get("scratch_bytes"), int) and 0 <= scratch < 2**63:
        rows.append(("scratch memory", f"{spell_bytes(scratch)} at the largest shapes"))
    if proof := _PROOFS.get(str(sidecar.get("plan_proof"))):
        rows.append(("proof", proof))
    try:
        rows += attention_rows(sidecar.get("attention") or []).items()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        rows.append(("attention", "not told: the sidecar's entries cannot be read"))
    return rows


def _onnx_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(f"input {name}", dims) for name, dims in found["inputs"].items()]
    rows += [("works with", _spell(found["dims"]))] if found["dims"] else []
    rows += [("outputs", ", ".join(found["outputs"])), ("opsets", _spell(found["opsets"]))]
    if found["nodes"]:
        bodies = ", ".join(found["bodies"])
        rows.append(("function bodies", bodies or "none: ONNX Runtime needs a library for the nodes"))
    return rows + ([(node["name"], _describe(node)) for node in found["nodes"]] or [("FlashAttention", "no node")])


def _describe(node: dict[str, Any]) -> str:
    written = node["attributes"]
    shown = [f"{name} {written[name]:g}" for name in INT_ATTRIBUTES | FLOAT_ATTRIBUTES if name in written]
    return f"{node['operator']} {', '.join(shown)}"


def _spell(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"name", "version"}:
        return f"{value['name']} {value['version']}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_spell(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ("x" if all(isinstance(n, int) for n in value) else ", ").join(map(str, value)) or "the GPU here"
    return str(value)
