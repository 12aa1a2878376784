# SPDX-License-Identifier: Apache-2.0
"""Whether the function bodies in a file compute what its FlashAttention nodes say.

A body holds only what the nodes of its file used when it was written, and ignores the other attributes, which the
plugin and the CPU library obey. So a body alone proves nothing of a node whose attributes were changed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from flash_export.errors import UnsupportedModel, UsageError, UserError
from flash_export.foreign_body import told
from flash_export.function_body import CAST_LIKE_SINCE, functions_for
from flash_export.op import DOMAIN, FLOAT_ATTRIBUTES, INT_ATTRIBUTES, OPERATORS, Attributes
from flash_trt.onnx_file import FlashNode, OnnxFile

_Values = Mapping[str, int | float]

_OFF_AND_ON: dict[str, tuple[float, float]] = {
    "softcap": (0.0, 1.0),
    "window_left": (-1, 1),
    "window_right": (-1, 1),
    **dict.fromkeys(("causal", "diagonal", "has_bias", "has_kv_lengths", "has_sinks", "layout"), (0, 1)),
}
"""Attributes that a body may leave out, each with a value for which it can and one for which it cannot."""


def require_obeyed(file: OnnxFile) -> None:
    """Refuses a file with a FlashAttention node that its function body does not compute.

    A node without a body is passed over, and so is a body that holds more than the nodes need.

    Raises:
        UsageError: an attribute is outside its range, or the operator cannot have it.
        UnsupportedModel: a body ignores an attribute, or is none that flash-export writes for these attributes.
    """
    bodies = {f.name: f for f in file.proto.functions if f.domain == DOMAIN and f.name in OPERATORS}
    by_name: dict[str, list[FlashNode]] = {}
    for node in file.flash_nodes:
        _require_in_range(file, node)
        by_name.setdefault(node.operator, []).append(node)
    for operator, nodes in by_name.items():
        body = bodies.get(operator)
        if body is not None and not _is_body_of(body, values := [_numbers(node) for node in nodes]):
            raise _disobeyed(file, nodes, _ignored(body, values))


def _numbers(node: FlashNode) -> _Values:
    names = INT_ATTRIBUTES | FLOAT_ATTRIBUTES
    return {name: v for name, v in node.attributes.items() if name in names and isinstance(v, (int, float))}


def _require_in_range(file: OnnxFile, node: FlashNode) -> None:
    try:
        why = Attributes(**_numbers(node)).why_not_of(OPERATORS[node.operator])  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:  # a TypeError where one is missing
        why = str(error)
    if why:
        raise UsageError(
            "a FlashAttention node's attributes are not the operator's",
            where=f'{file.path}, node "{node.name}"',
            got=why,
            need="attributes that the operator has, each in its range",
            do="export the model again with flash-export, or correct the node; docs/op.md has the attributes",
        )


def _disobeyed(file: OnnxFile, nodes: Sequence[FlashNode], found: tuple[str, int] | None) -> UnsupportedModel:
    if found is None:
        name, got = nodes[0].name, f"a body of {nodes[0].operator} that flash-export does not write for its attributes"
    else:
        attribute, index = found
        name, value = nodes[index].name, nodes[index].attributes[attribute]
        got = f"{attribute} {value}, which the file's body of {nodes[index].operator} ignores"
    return UnsupportedModel(
        "a FlashAttention node's function body does not compute what its attributes say",
        where=f'{file.path}, node "{name}"' + (f", attribute {found[0]}" if found else ""),
        got=got,
        need="the body for these attributes, as flash-export writes it: runtimes with our operator compute by the"
        " attributes, all others by the body",
        do="export the model again; flash-export writes nodes and bodies that agree",
    )


def _ignored(body: onnx.FunctionProto, nodes: Sequence[_Values]) -> tuple[str, int] | None:
    """The attribute that alone keeps ``body`` from being theirs, and the index of the first node that has it so."""
    for name, choices in _OFF_AND_ON.items():
        for choice in choices:
            others = [i for i, node in enumerate(nodes) if node[name] != choice]
            if others and _is_body_of(body, [{**node, name: choice} for node in nodes]):
                return name, others[0]
    return None


def _is_body_of(body: onnx.FunctionProto, nodes: Sequence[_Values]) -> bool:
    """Whether flash-export writes ``body`` for a file of ``nodes``, or of these and others."""
    written = told(ir.from_proto(body))
    return any(_expected(body, [*nodes, *more]) == written for more in ([], *_others(body, nodes[0])))


def _others(body: onnx.FunctionProto, node: _Values) -> Iterator[list[_Values]]:
    """Nodes that a larger file may have had as well, of which this one is a part: they use all that ``body`` reads."""
    read = {attribute.ref_attr_name for inner in body.node for attribute in inner.attribute} - {""}
    off, on = ({name: values[turn] for name, values in _OFF_AND_ON.items() if name in read} for turn in (0, 1))
    yield [{**node, **off}, {**node, **on}]
    if "kv_num_heads" in read:
        yield [{**node, **off}, {**node, **on, "q_num_heads": 2, "kv_num_heads": 1}]


def _expected(body: onnx.FunctionProto, nodes: Sequence[_Values]) -> list[object] | None:
    """What flash-export writes for ``nodes`` at the opset of ``body``; None where there are no such nodes."""
    if any(Attributes(**values).why_not_of(OPERATORS[body.name]) for values in nodes):  # type: ignore[arg-type]
        return None
    opset = next((entry.version for entry in body.opset_import if entry.domain == ""), 1)
    dtype = ir.DataType.FLOAT if opset >= CAST_LIKE_SINCE else _cast_to(body)
    made = [
        ir.node(
            body.name,
            [ir.Value(type=ir.TensorType(dtype)) for _ in OPERATORS[body.name].inputs],
            dict(values),
            domain=DOMAIN,
        )
        for values in nodes
    ]
    try:
        (function,) = functions_for(made, opset)
    except UserError:
        return None
    return told(function)


def _cast_to(body: onnx.FunctionProto) -> ir.DataType:
    """The query's dtype: before opset 15 a body casts its output to it by name."""
    for node in body.node:
        if node.op_type == "Cast" and node.output[0] == body.output[0]:
            return ir.DataType(next((a.i for a in node.attribute if a.name == "to"), 0))
    return ir.DataType.UNDEFINED
