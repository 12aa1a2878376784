# SPDX-License-Identifier: Apache-2.0
"""The opset of local functions: each may have one of its own, and its body can stand in the graph where that opset has
the same versions of its operators as the graph's.

onnx's checker asks that of a function's nodes, too, though not of those in a branch or body. onnx's own converter is
not used: it needs the types of all values and ends in an assertion where one is missing.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx.defs
import onnx_ir as ir


def align(model: ir.Model, identifiers: Iterable[ir.OperatorIdentifier]) -> dict[ir.OperatorIdentifier, str]:
    """Gives these functions the graph's opset where their operators are the same there.

    Returns:
        The functions that keep another opset than the graph's, each with the reason. A function that calls one of
        them is not among them for that.
    """
    others = {}
    for identifier in identifiers:
        function = model.functions[identifier]
        why = _why_not(function, model.opset_imports)
        if why:
            others[identifier] = why
            continue
        for domain in function.opset_imports:
            if domain in model.opset_imports:
                function.opset_imports[domain] = model.opset_imports[domain]
    return others


def _why_not(function: ir.Function, wanted: dict[str, int]) -> str:
    for domain, version in function.opset_imports.items():
        target = wanted.get(domain, version)
        if target == version:
            continue
        says = f"{function.name} is of opset {version}, the graph of {target}"
        if domain not in ("", "ai.onnx"):
            return f"{says}, of domain {domain}"
        for node in function.all_nodes():
            if node.domain in ("", "ai.onnx") and not _same(node.op_type, version, target):
                return f"{says}, and {node.op_type} is not the same in both"
    return ""


def _same(operator: str, version: int, target: int) -> bool:
    try:
        schemas = [onnx.defs.get_schema(operator, v, "") for v in (version, target)]
    except onnx.defs.SchemaError:
        return False
    return bool(schemas[0].since_version == schemas[1].since_version)
