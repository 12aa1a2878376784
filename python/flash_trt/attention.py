# SPDX-License-Identifier: Apache-2.0
"""Who computes each attention of an engine: our plugin, TensorRT's own fused kernel, or a chain that holds S x S."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import onnx_ir as ir

from flash_export.find import find
from flash_trt import plan_program
from flash_trt.byte_sizes import spell_bytes
from flash_trt.onnx_file import OnnxFile

By = Literal["plugin", "tensorrt_fused", "unfused_chain", "not_told"]

WORDS: dict[By, str] = {
    "plugin": "our plugin",
    "tensorrt_fused": "TensorRT's own fused kernel",
    "unfused_chain": "an unfused chain",
    "not_told": "not told by the plan",
}

_NO_SCRATCH = ", without scratch memory"


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """One attention of a model and who computes it in the engine.

    ``scratch_bytes``: of our plugin the workspace that it takes at the largest shapes, else what the kernels around its
    softmax keep in scratch memory; None where the plan does not tell (of a chain, with a dynamic length).
    """

    name: str
    by: By
    scratch_bytes: int | None = None

    def as_json(self) -> dict[str, object]:
        """The attention's entry in the sidecar."""
        return dataclasses.asdict(self)


def describe(file: OnnxFile, plan: bytes) -> list[Attention]:
    """Every attention of ``file``, in its order: its FlashAttention nodes, then what was left in standard operators."""
    taken = plan_program.workspaces(plan)
    ours = [Attention(node.name, "plugin", taken.get(node.name)) for node in file.flash_nodes if node.is_needed]
    names = {attention.name for attention in ours}
    launches = plan_program.launches(plan)
    left = [
        site
        for site in find(ir.load(file.path, format="protobuf"))
        if site.status != "not_attention" and site.name not in names
    ]
    return ours + [_read(site.name, launches) for site in left]


def attention_rows(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A sidecar's entries for people, one row for each way of computing; what is not our plugin is named."""
    rows: dict[str, str] = {}
    for by, words in WORDS.items():
        mine = [entry for entry in entries if entry["by"] == by]
        if by != "plugin" and mine:
            named = [
                entry["name"] + (f" ({spell_bytes(entry['scratch_bytes'])})" if entry["scratch_bytes"] else "")
                for entry in mine
            ]
            words += f": {', '.join(named)}"
        elif known := [entry["scratch_bytes"] for entry in mine if entry["scratch_bytes"] is not None]:
            largest = max(known)
            words += f", with up to {spell_bytes(largest)} of scratch memory each" if largest else _NO_SCRATCH
        if mine:
            rows["attention" if not rows else f"attention ({by})"] = f"{len(mine)} by {words}"
    return rows


def from_layers(found: Attention, layers: Sequence[Any]) -> Attention:
    """``found``, or what TensorRT's engine inspector tells of it where the plan's bytes did not.

    A layer names the ONNX nodes that it computes in its ``Metadata``; a fused kernel shows in its name or tactic.
    """
    if found.by != "not_told":
        return found
    marks = [f"[ONNX Layer: {name}]" for name in (found.name, f"node_of_{found.name}")]
    mine = [
        layer for layer in layers if isinstance(layer, dict) and any(m in str(layer.get("Metadata")) for m in marks)
    ]
    if not mine:
        return found
    kernels = [str(layer.get(key, "")) for layer in mine for key in ("Name", "TacticName")]
    fused = any(plan_program.FUSED_ATTENTION in kernel for kernel in kernels)
    return dataclasses.replace(found, by="tensorrt_fused" if fused else "unfused_chain")


def _read(name: str, launches: list[plan_program.Launch]) -> Attention:
    mine = [launch for launch in launches if name in launch.nodes or f"node_of_{name}" in launch.nodes]
    if not mine:
        return Attention(name, "not_told")
    fused_in = {launch.program for launch in mine if launch.kernel.startswith(plan_program.FUSED_ATTENTION)}
    # One profile, or generation, in which a chain runs is what has the S x S matrix.
    chained = [launch for launch in mine if launch.program not in fused_in]
    fused, mine = not chained, chained or mine
    known = [launch.scratch_bytes for launch in mine if launch.scratch_bytes is not None]
    scratch = max(known) if len(known) == len(mine) else None
    return Attention(name, "tensorrt_fused" if fused else "unfused_chain", scratch)
