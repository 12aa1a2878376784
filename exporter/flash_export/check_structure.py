# SPDX-License-Identifier: Apache-2.0
"""The fused file as a file: schema, types and shapes, and every FlashAttention node as the operator's page says.

Everything goes by path, so a file of any size is judged without holding its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx.checker

from flash_export.op import DOMAIN, OPERATORS, STRING_ATTRIBUTES, Attributes


class BrokenRewrite(Exception):
    """The rewritten file breaks the standard or the operator's contract. A bug of ours, never the user's mistake."""


def check_structure(path: Path, unfused: Path | None = None) -> None:
    """Accepts the fused file at ``path`` or says what is wrong with it.

    Args:
        unfused: what it was made from. Where that one already contradicts the shapes that onnx infers, as files of
            some exporters do, the fused one may as well: runtimes ignore it, and the numbers are compared. Nodes
            of ours that were there before are not the rewrite's and may break the contract.

    Raises:
        BrokenRewrite: names the node and what is wrong with it.
    """
    skeleton = onnx.load(path, format="protobuf", load_external_data=False)
    found_there = _outputs_of_ours(unfused)
    for node in attention_nodes(skeleton):
        if tuple(node.output) not in found_there:
            check_node(node)
    refusal = why_refused(path, skeleton)
    if refusal is not None and unfused is not None and why_refused(unfused) is not None:
        refusal = _refusal(path, full=False, custom=False)
    if refusal is not None:
        raise BrokenRewrite(f"onnx.checker refuses the fused file: {refusal}") from refusal


def _outputs_of_ours(unfused: Path | None) -> set[tuple[str, ...]]:
    """What the nodes of our domain in the unfused file compute."""
    if unfused is None:
        return set()
    return {
        tuple(node.output) for node in attention_nodes(onnx.load(unfused, format="protobuf", load_external_data=False))
    }


def attention_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of our domain: in the graph, in subgraphs and in local functions of other domains."""
    yield from _ours(model.graph.node)
    for function in model.functions:
        yield from _ours(function.node)


def _ours(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        if node.domain == DOMAIN:
            yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _ours(graph.node)


def check_node(node: onnx.NodeProto) -> None:
    """Accepts one FlashAttention node.

    Raises:
        BrokenRewrite: its name, arity, or an attribute is not as ``docs/op.md`` says.
    """
    where = f"node {node.name or node.output[0]} ({node.op_type})"
    operator = OPERATORS.get(node.op_type)
    if operator is None:
        raise BrokenRewrite(f"{where}: no operator of {DOMAIN}; it has {sorted(OPERATORS)}")
    for side, got, names in (("input", node.input, operator.inputs), ("output", node.output, operator.outputs)):
        if len(got) != len(names) or not all(got):
            raise BrokenRewrite(f"{where}: {side}s {list(got)} instead of {list(names)}, none left out")
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
    text = {name: value.decode() for name, value in given.items() if isinstance(value, bytes)}
    if {n: text.get(n) for n in STRING_ATTRIBUTES} != STRING_ATTRIBUTES:
        raise BrokenRewrite(f"{where}: attributes {text} instead of {STRING_ATTRIBUTES}")
    numbers = {name: value for name, value in given.items() if name not in text}
    needed = set(Attributes.__dataclass_fields__)
    missing, unknown = sorted(needed - set(numbers)), sorted(set(numbers) - needed)
    if missing or unknown:
        raise BrokenRewrite(f"{where}: attributes missing {missing}, unknown {unknown}")
    try:
        Attributes(**numbers)
    except ValueError as error:
        raise BrokenRewrite(f"{where}: {error}") from error


def why_refused(path: Path, skeleton: onnx.ModelProto | None = None) -> Exception | None:
    """Why onnx's checker, as strict as the model allows, refuses the file; None where it does not.

    Operators of ONNX Runtime's own domains have no schema in onnx, and there ``check_custom_domain`` and strict
    inference would refuse what is right; so does ``check_custom_domain`` at a call of a local function.

    Args:
        skeleton: the file's content, where it is loaded already.
    """
    skeleton = skeleton or onnx.load(path, format="protobuf", load_external_data=False)
    local = {f.domain for f in skeleton.functions} - {DOMAIN}
    known = {"", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training", DOMAIN}
    full = {o.domain for o in skeleton.opset_import} <= known | local
    return _refusal(path, full=full, custom=full and not local)


def _refusal(path: Path, *, full: bool, custom: bool) -> Exception | None:
    try:
        onnx.checker.check_model(str(path), full_check=full, check_custom_domain=custom)
    except Exception as error:  # the checker raises classes of several C++ libraries
        return error
    return None
