# SPDX-License-Identifier: Apache-2.0
"""One node of a cache form, what its model is fed, and what is made of the model's outputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from contract.cache_cases import CacheTensors
from contract.node_model import IR_DTYPES
from contract.tolerance import DTYPES
from flash_export.op import DOMAIN, OPERATORS, STRING_ATTRIBUTES


def node_of(tensors: CacheTensors, prefix: str = "") -> ir.Node:
    """The case's node; every axis of its inputs is dynamic."""
    case = tensors.case
    numbers = case.attributes().items()
    attributes = [ir.AttrFloat32(n, v) if isinstance(v, float) else ir.AttrInt64(n, v) for n, v in numbers]
    attributes += [ir.AttrString(name, value) for name, value in STRING_ATTRIBUTES.items()]
    inputs = []
    for name in OPERATORS[case.operator].inputs:
        array = tensors.given[name]
        shape = ir.Shape([f"{prefix}{name}_{axis}" for axis in range(array.ndim)])
        dtype = ir.DataType.from_numpy(array.dtype)
        inputs.append(ir.Value(name=prefix + name, type=ir.TensorType(dtype), shape=shape))
    outputs = [ir.Value(name=prefix + name) for name in OPERATORS[case.operator].outputs]
    own = IR_DTYPES[case.dtype]
    for output, dtype in zip(outputs, (own, ir.DataType.FLOAT, ir.DataType.INT32, own, own), strict=True):
        output.dtype = dtype
    return ir.Node(DOMAIN, case.operator, inputs, attributes, outputs=outputs, name=prefix + "attention")


def feeds(tensors: CacheTensors) -> dict[str, NDArray]:
    """The inputs that the model takes, bf16 ones as fp32."""
    given = {name: tensors.given[name] for name in OPERATORS[tensors.case.operator].inputs}
    return {n: a.astype(np.float32) if a.dtype == DTYPES["bf16"] else a for n, a in given.items()}


def named(tensors: CacheTensors, outputs: list[NDArray]) -> dict[str, NDArray]:
    """The model's outputs by the node's names, in the node's dtypes."""
    got = dict(zip(OPERATORS[tensors.case.operator].outputs, outputs, strict=True))
    for name in ("output", "key_cache_out", "value_cache_out"):
        got[name] = got[name].astype(DTYPES[tensors.case.dtype])
    return got


def why_wrong(tensors: CacheTensors, outputs: list[NDArray]) -> list[str]:
    """Why the model's outputs are not accepted."""
    return tensors.why_wrong(named(tensors, outputs))
