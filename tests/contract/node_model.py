# SPDX-License-Identifier: Apache-2.0
"""A model of one FlashAttention node with its function body: what the exporter writes, as small as it gets."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from contract.cases import Case
from contract.tensors import DTYPES
from flash_export.function_body import functions_for
from flash_export.op import DOMAIN, OPERATORS, STRING_ATTRIBUTES, VERSION

IR_VERSION = 9
IR_DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


def node_of(case: Case, inputs: list[ir.Value], prefix: str = "") -> ir.Node:
    """The case's node, every attribute written out."""
    operator = OPERATORS[case.operator]
    attributes = [
        *(ir.AttrFloat32(n, v) if isinstance(v, float) else ir.AttrInt64(n, v) for n, v in case.attributes().items()),
        *(ir.AttrString(name, value) for name, value in STRING_ATTRIBUTES.items()),
    ]
    outputs = [ir.Value(name=prefix + name) for name in operator.outputs]
    outputs[0].dtype = IR_DTYPES[case.dtype]
    if len(outputs) > 1:
        outputs[1].dtype = ir.DataType.FLOAT
    return ir.Node(DOMAIN, case.operator, inputs, attributes, outputs=outputs, name=prefix + "attention")


def inputs_of(case: Case, arrays: list[NDArray], prefix: str = "") -> list[ir.Value]:
    """Typed graph inputs in the operator's order; every axis is dynamic, so a body can use no size it did not read."""
    values = []
    for name, array in zip(OPERATORS[case.operator].inputs, arrays, strict=True):
        shape = ir.Shape([f"{prefix}{name}_{axis}" for axis in range(array.ndim)])
        dtype = ir.DataType.from_numpy(array.dtype)
        values.append(ir.Value(name=prefix + name, type=ir.TensorType(dtype), shape=shape))
    return values


def model_of(nodes: list[ir.Node], opset: int, *, body: bool = True) -> onnx.ModelProto:
    """A model around ``nodes``: their inputs and outputs are the graph's."""
    inputs = [value for node in nodes for value in node.inputs if value is not None]
    outputs = [value for node in nodes for value in node.outputs]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": opset, DOMAIN: VERSION}, name="one_node")
    functions = functions_for(nodes, opset) if body else []
    return ir.to_proto(ir.Model(graph, ir_version=IR_VERSION, functions=functions, producer_name="flash-export tests"))


def model_of_case(case: Case, arrays: list[NDArray], opset: int) -> onnx.ModelProto:
    """The case's model."""
    assert arrays[0].dtype == DTYPES[case.dtype]
    return model_of([node_of(case, inputs_of(case, arrays))], opset)
