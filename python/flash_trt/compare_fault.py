# SPDX-License-Identifier: Apache-2.0
"""Whether a comparison would have seen a fault of attention: FUSED once more, with scales that are 1 % off.

A row that sees one key gets that key's value whatever the scale, and so does every row where a model takes no length
but 1. As in flash-export's own check, inputs on which such a fault does not show prove nothing of attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import onnx

from flash_export import call_count
from flash_export.check_site import SEEDED_FAULT
from flash_export.errors import UnsupportedModel
from flash_export.function_builder import CONSTANT_TAKES_NUMBERS
from flash_export.op import DOMAIN, OPERATORS
from flash_export.trials import Trial
from flash_trt import runners
from flash_trt.compare_choice import infer
from flash_trt.verdict import Outputs, RunOutputs, judge_runs


def shows(fused: Path, runs: Sequence[RunOutputs], more: Sequence[tuple[Outputs, Outputs]], *, softcap: bool) -> bool:
    """Whether one of ``runs`` fails once the scale of every FlashAttention node in ``fused`` is 1 % off.

    True too where that cannot be tried: before opset 12, where the bodies hold the scale themselves, and where this
    ONNX Runtime does not load a model with weights in other files from memory.

    Args:
        fused: the file that gave the runs' outputs, in float32.
        runs, more, softcap: as ``judge_runs`` was given them, and failed none of them.
    """
    faulty = _with_fault(fused)
    if faulty is None:
        return True
    try:
        runner = runners.open_onnx(fused, "fused", instead=faulty)
    except UnsupportedModel:
        return True
    try:
        for i, run in enumerate(runs):
            outputs = infer(runner, Trial(run.name, run.feeds))
            if isinstance(outputs, Exception):
                return True
            faulty_runs = [*runs[:i], dataclasses.replace(run, fused=outputs), *runs[i + 1 :]]
            if any(verdict.failed for verdict in judge_runs(faulty_runs, more=more, softcap=softcap)):
                return True
        return False
    finally:
        runner.deactivate()


def _with_fault(path: Path) -> bytes | None:
    """The model with the fault, its weights in other files left there; None where its nodes do not say the scale."""
    proto = onnx.load(str(path), format="protobuf", load_external_data=False)
    if any(o.domain == "" and o.version < CONSTANT_TAKES_NUMBERS for o in proto.opset_import):
        return None
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in call_count.all_nodes(nodes):
            if node.domain == DOMAIN and node.op_type in OPERATORS:
                for attribute in node.attribute:
                    if attribute.name == "scale":
                        attribute.f *= SEEDED_FAULT
    return bytes(proto.SerializeToString())
