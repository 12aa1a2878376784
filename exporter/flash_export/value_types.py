# SPDX-License-Identifier: Apache-2.0
"""Types that a file states for the values between its nodes, and that the operators contradict.

PyTorch's exporter calls the sequence that ``SplitToSequence`` makes a tensor. ONNX Runtime does not load such a file,
and onnx infers nothing in it. A file need not state these types at all: what the operator says is enough.
"""

from __future__ import annotations

import onnx.defs
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass


def infer(model: ir.Model, *, check_type: bool = True, strict_mode: bool = True) -> None:
    """Types and shapes as onnx infers them, in place; nothing where it cannot.

    onnx_ir notes an inferred sequence as a tensor of the sequence's element type, which is taken back.
    """
    ShapeInferencePass(check_type=check_type, strict_mode=strict_mode)(model)
    drop_contradicted(model)


def drop_contradicted(model: ir.Model) -> int:
    """Takes type and shape from every value of which they cannot be, in place, and returns how many there were.

    That is a tensor that is a sequence by its operator's schema, or the like, and an element type other than the only
    one that an operator gives. Outputs of the model keep what is stated.
    """
    found = 0
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        for node in body.all_nodes():
            if node.domain not in ("", "ai.onnx"):
                continue
            schema = _schema(node, body.opset_imports.get("", model.opset_imports.get("", 1)))
            for index, value in enumerate(node.outputs):
                if schema is not None and not value.is_graph_output() and _contradicts(value, schema, index):
                    value.type = value.shape = None
                    found += 1
    return found


def _schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def _contradicts(value: ir.Value, schema: onnx.defs.OpSchema, index: int) -> bool:
    if value.type is None or not schema.outputs:
        return False
    allowed = schema.outputs[min(index, len(schema.outputs) - 1)].types
    if len(allowed) == 1 and isinstance(value.type, ir.TensorType):
        return f"tensor({value.type.dtype.name.lower()})" not in allowed
    kinds = {text.partition("(")[0] for text in allowed}
    return bool(kinds) and _kind(value.type) not in kinds


def _kind(of: ir.TypeProtocol) -> str:
    if isinstance(of, ir.SequenceType):
        return "seq"
    if isinstance(of, ir.OptionalType):
        return "optional"
    return "sparse_tensor" if isinstance(of, ir.SparseTensorType) else "tensor"
