# SPDX-License-Identifier: Apache-2.0
"""A model of one FlashAttention node with its function body: what the exporter writes, as small as it gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from contract.cases import Case
from contract.tensors import heads_first
from contract.tolerance import DTYPES
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


def model_of(nodes: list[ir.Node], opset: int) -> onnx.ModelProto:
    """A model around FlashAttention nodes: their inputs and outputs are the graph's, bf16 ones as fp32 behind a cast.

    The cast loses nothing, and not every runtime takes and hands out bf16 arrays.
    """
    before, after, inputs, outputs = [], [], [], []
    for value in (value for node in nodes for value in node.inputs):
        assert value is not None
        inputs.append(value)
        if value.dtype == ir.DataType.BFLOAT16:
            inputs[-1] = ir.Value(name=value.name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
            value.name = f"{value.name}_bf16"
            before.append(_cast(inputs[-1], value, ir.DataType.BFLOAT16))
    for value in (value for node in nodes for value in node.outputs):
        outputs.append(value)
        if value.dtype == ir.DataType.BFLOAT16:
            outputs[-1] = ir.Value(name=value.name, type=ir.TensorType(ir.DataType.FLOAT))
            value.name = f"{value.name}_bf16"
            after.append(_cast(value, outputs[-1], ir.DataType.FLOAT))
    opsets = {"": opset, DOMAIN: VERSION}
    graph = ir.Graph(inputs, outputs, nodes=[*before, *nodes, *after], opset_imports=opsets, name="attention")
    functions = functions_for(nodes, opset)
    return ir.to_proto(ir.Model(graph, ir_version=IR_VERSION, functions=functions, producer_name="flash-export tests"))


def _cast(source: ir.Value, target: ir.Value, dtype: ir.DataType) -> ir.Node:
    return ir.Node("", "Cast", [source], [ir.AttrInt64("to", int(dtype))], outputs=[target])


def model_of_case(case: Case, arrays: list[NDArray], opset: int) -> onnx.ModelProto:
    """The case's model."""
    return model_of([node_of(case, inputs_of(case, arrays))], opset)


def feeds(case: Case, arrays: list[NDArray], prefix: str = "") -> dict[str, NDArray]:
    """What ``model_of`` of this case takes, by name."""
    names = (prefix + name for name in OPERATORS[case.operator].inputs)
    bf16 = DTYPES["bf16"]
    return {n: a.astype(np.float32) if a.dtype == bf16 else a for n, a in zip(names, arrays, strict=True)}


def results(case: Case, arrays: Sequence[NDArray]) -> tuple[NDArray, NDArray | None]:
    """Heads-first output in the case's dtype, and lse where the operator has one, from the model's outputs."""
    output, *lse = arrays
    return heads_first(output, case.layout, case.heads_q).astype(DTYPES[case.dtype]), lse[0] if lse else None
