# SPDX-License-Identifier: Apache-2.0
"""Twins of a model: the same computation in float32 (what the check runs) or in float64 (what it measures against).

A half-precision model hides a wrong scale under its own rounding, so its numbers are compared in float32; and the
rounding of the float32 run is measured against a float64 run, so that a tolerance never has to be guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flash_export import contrib_twin
from flash_export.contrib_product import CONTRIB_DOMAIN
from flash_export.inline import CannotInline, inline_all
from flash_export.mapped import mapped
from flash_export.value_types import infer

_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_FLOATS = _HALVES | {ir.DataType.FLOAT}

_TYPE_ATTRIBUTES = ("to", "dtype", "softmax_precision")
"""Attributes that name an element type: of Cast, of EyeLike and the random operators, of Attention."""

_MOVES_DATA = frozenset({
    "Cast", "CastLike", "Compress", "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "DepthToSpace",
    "Expand", "EyeLike", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "If", "IsInf", "IsNaN", "Loop",
    "NonZero", "OneHot", "Pad", "Range", "Reshape", "Scan", "ScatterElements", "ScatterND", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "Shape", "Size", "Slice",
    "SpaceToDepth", "Split", "SplitToSequence", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
_COMPUTES_IN_FLOAT64 = frozenset({
    "Abs", "Add", "ArgMax", "ArgMin", "Attention", "Ceil", "Clip", "Cos", "CumSum", "Div", "Dropout", "Einsum",
    "Elu", "Equal", "Exp", "Floor", "Gemm", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul", "Max", "Min", "Mish",
    "Mul", "Neg", "Not", "PRelu", "Pow", "RMSNormalization", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu",
    "Round", "Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Softsign", "Sqrt", "Sub", "Tan", "Tanh", "TopK",
})  # fmt: skip
"""What ONNX Runtime's CPU provider computes in float64; every other operator of a float64 twin runs in float32."""


class NoTwin(Exception):
    """A float64 twin cannot be made; the text says why. Never shown as an error: the check falls back."""


def roundoff(model: ir.Model) -> float:
    """The unit roundoff of the narrowest float type of ``model``, over that of float32."""
    found = {value.dtype for value in _values(model)}
    if ir.DataType.BFLOAT16 in found:
        return 2.0**16
    return 2.0**13 if ir.DataType.FLOAT16 in found else 1.0


def infer_types(model: ir.Model) -> None:
    """Every value has its type afterwards, as far as onnx can tell; many exporters write none.

    Shapes that outputs are declared with stay: onnx infers 0 for the keys of an ``Attention``'s second output.
    """
    if any(value.dtype is None for value in _values(model)):
        declared = [(value, value.shape) for value in model.graph.outputs]
        infer(model, strict_mode=False)
        for value, shape in declared:
            value.shape = shape or value.shape


def to_float32(model: ir.Model) -> None:
    """Turns every float16 and bfloat16 tensor of ``model`` into float32, in place and lazily.

    Operators that nothing on a CPU computes are written out first (``contrib_twin``).
    The smallest and the largest finite number of a type, which stand for "masked", become those of the new type.
    What the graph computes from constants and shapes alone, such as a scale, keeps its rounding: it is a number that
    the rewrite has read, and rounded to half precision it may be another one by 0.4 %.
    """
    contrib_twin.write_out(model)
    infer_types(model)
    roundings = _rounded_constants(model)
    _retype(model, _HALVES, ir.DataType.FLOAT)
    for value, dtype in roundings:
        _round_after(value, dtype)


def _rounded_constants(model: ir.Model) -> list[tuple[ir.Value, ir.DataType]]:
    """Half-precision results of nodes that read constants and shapes only, and their type."""
    nodes = (node for node in _constant_nodes(model) if node.op_type != "Constant")
    return [(v, v.dtype) for node in nodes for v in node.outputs if v.dtype in _HALVES]


def _constant_nodes(model: ir.Model) -> list[ir.Node]:
    """Nodes that read constants and shapes only, whatever numbers go into the model."""
    constant: set[ir.Value] = {v for graph in model.graphs() for v in graph.initializers.values()}
    constant.difference_update(v for graph in model.graphs() for v in graph.inputs)
    found = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type not in ("Shape", "Size") and not all(v is None or v in constant for v in node.inputs):
            continue
        if node.op_type.startswith("Random") or node.op_type in ("If", "Loop", "Scan"):
            continue
        constant.update(node.outputs)
        found.append(node)
    return found


def _round_after(value: ir.Value, dtype: ir.DataType) -> None:
    """Whoever reads ``value`` gets it rounded to ``dtype`` and back."""
    node = value.producer()
    assert node is not None
    narrow = ir.node("Cast", [value], {"to": dtype})
    back = ir.node("Cast", [narrow.outputs[0]], {"to": ir.DataType.FLOAT})
    narrow.outputs[0].name, narrow.outputs[0].type = f"{value.name}/rounded", ir.TensorType(dtype)
    wide = back.outputs[0]
    wide.type, wide.shape = value.type, value.shape
    value.replace_all_uses_with(wide, replace_graph_outputs=True)
    narrow.replace_input_with(0, value)
    wide.name, value.name = value.name, f"{value.name}/exact"
    node.append([narrow, back])


def to_float64(model: ir.Model, *, in_float32: frozenset[str] = frozenset()) -> None:
    """Turns every float32 tensor of ``model`` into float64, in place and lazily; halves are left by ``to_float32``
    where a constant is rounded, and stay.

    Operators that ONNX Runtime cannot compute in float64 (Erf, Conv, ...) run in float32 between two Casts, and so
    do those that ``in_float32`` names. So does what turns a float into an integer or a truth, out of constants and
    shapes alone, as T5 does to find the bucket of a distance: in float64 it would decide otherwise, and that is another
    model and no rounding.

    Raises:
        NoTwin: a type that decides where a Cast must stand is unknown, or a function cannot become part of the graph.
    """
    try:
        inline_all(model)
    except CannotInline as error:
        raise NoTwin(str(error)) from error
    infer_types(model)
    _fence_float32(model, in_float32)
    _retype(model, frozenset({ir.DataType.FLOAT}), ir.DataType.DOUBLE)


_FENCED = "flash_export_fenced"
"""Mark in a value's or a node's ``meta``: it stays float32 in a float64 twin."""


def _fence_float32(model: ir.Model, in_float32: frozenset[str]) -> None:
    """Puts a Cast before and after each operator that has no float64 kernel."""
    free = (_COMPUTES_IN_FLOAT64 | _MOVES_DATA) - in_float32
    products = {"FusedMatMul"} - in_float32
    deciding = _deciding(model)
    for node in list(_nodes(model)):
        if node not in deciding and node.op_type in (free if node.domain in ("", "ai.onnx") else products):
            continue
        if node.domain == CONTRIB_DOMAIN and "Attention" in node.op_type:
            # Between two Casts it would show no rounding at all, and nothing could be told from its own.
            raise NoTwin(f"{node.op_type} of {node.domain} computes in float32 alone")
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise NoTwin(f"{node.op_type} holds a subgraph")
        node.meta[_FENCED] = True
        for i, value in enumerate(node.inputs):
            if value is None:
                continue
            if value.dtype is None:
                raise NoTwin(f"the type of {value.name} is unknown")
            if value.dtype == ir.DataType.FLOAT:
                node.replace_input_with(i, _cast_before(node, i, value))
        for value in list(node.outputs):
            if value.dtype is None and value.uses():
                raise NoTwin(f"the type of {value.name} is unknown")
            if value.dtype == ir.DataType.FLOAT and not isinstance(value.type, ir.TensorType):
                raise NoTwin(f"{node.op_type} makes no tensor")
            if value.dtype == ir.DataType.FLOAT:
                _cast_after(node, value)


def _deciding(model: ir.Model) -> set[ir.Node]:
    """Of the nodes that read constants and shapes only, those whose floats end in an integer or a truth."""
    constant = set(_constant_nodes(model))
    found = set()
    todo = [n for n in constant if _reads_float(n) and not any(v.dtype in _FLOATS for v in n.outputs)]
    while todo:
        node = todo.pop()
        found.add(node)
        makers = (v.producer() for v in node.inputs if v is not None and v.dtype in _FLOATS)
        todo.extend(m for m in makers if m in constant and m not in found and m is not None and m.op_type != "Constant")
    return found


def _reads_float(node: ir.Node) -> bool:
    return any(v is not None and v.dtype in _FLOATS for v in node.inputs)


def _cast_before(node: ir.Node, operand: int, value: ir.Value) -> ir.Value:
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    cast.outputs[0].name = f"{node.outputs[0].name}/operand_{operand}"
    cast.outputs[0].dtype = ir.DataType.FLOAT
    cast.outputs[0].meta[_FENCED] = True
    cast.meta[_FENCED] = True
    node.prepend(cast)
    return cast.outputs[0]


def _cast_after(node: ir.Node, value: ir.Value) -> None:
    """``value`` keeps its name and moves behind the Cast, so that graph outputs stay what they are."""
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})  # retyped with the rest
    wide = cast.outputs[0]
    wide.type, wide.shape = value.type, value.shape
    value.replace_all_uses_with(wide, replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    wide.name, value.name = value.name, f"{value.name}/in_float32"
    value.meta[_FENCED] = True
    value.type = ir.TensorType(ir.DataType.FLOAT)
    node.append(cast)


def _retype(model: ir.Model, sources: frozenset[ir.DataType], target: ir.DataType) -> None:
    for value in _values(model):
        if _FENCED in value.meta or value.type is None or value.dtype not in sources:
            continue
        if value.const_value is not None:
            value.const_value = _converted(value.const_value, target)
        value.type = _typed(value.type, target)  # a new one: a cloned model shares its types with the original
    for node in _nodes(model):
        if _FENCED not in node.meta:
            _retype_attributes(node, sources, target)


def _typed(like: ir.TypeProtocol, dtype: ir.DataType) -> ir.TypeProtocol:
    """A tensor, a sequence or an optional of another element type."""
    if isinstance(like, (ir.SequenceType, ir.OptionalType)):
        return type(like)(_typed(like.elem_type, dtype))
    return type(like)(dtype)  # type: ignore[call-arg]


def _retype_attributes(node: ir.Node, sources: frozenset[ir.DataType], target: ir.DataType) -> None:
    for attribute in list(_type_attributes(node)):
        if attribute.value in sources:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(target))
    if node.op_type == "SequenceEmpty" and "dtype" not in node.attributes and ir.DataType.FLOAT in sources:
        node.attributes["dtype"] = ir.AttrInt64("dtype", int(target))
    if node.op_type in ("Constant", "ConstantOfShape"):
        tensor = _constant_tensor(node)
        if tensor is not None and tensor.dtype in sources:
            node.attributes.clear()
            node.attributes["value"] = ir.AttrTensor("value", _converted(tensor, target))


def _constant_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """What a Constant or a ConstantOfShape holds, where that may be a float tensor."""
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return None
        if name == "value":
            return attribute.as_tensor()
        if name == "value_float":
            return ir.tensor(np.float32(attribute.as_float()))
        if name == "value_floats":
            return ir.tensor(np.array(attribute.as_floats(), np.float32))
    return ir.tensor(np.zeros(1, np.float32)) if node.op_type == "ConstantOfShape" else None


def _type_attributes(node: ir.Node) -> Iterator[ir.Attr]:
    for name in _TYPE_ATTRIBUTES:
        attribute = node.attributes.get(name)
        if attribute is not None and not attribute.is_ref() and attribute.type == ir.AttributeType.INT:
            yield attribute


def _converted(tensor: ir.TensorProtocol, target: ir.DataType) -> ir.TensorProtocol:
    """The same numbers in another type, computed when they are read, so that one tensor is in memory at a time."""
    shape = ir.Shape(tensor.numpy().shape) if not isinstance(tensor.shape, ir.Shape) else tensor.shape
    return ir.LazyTensor(_converter(tensor, target), dtype=target, shape=shape, name=tensor.name)


def _converter(tensor: ir.TensorProtocol, target: ir.DataType) -> Callable[[], ir.Tensor]:
    def convert() -> ir.Tensor:
        with mapped(tensor):
            return ir.Tensor(convert_array(tensor.numpy(), target.numpy()), name=tensor.name)

    return convert


def convert_array(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``array`` in a wider float type; its type's smallest and largest finite number become those of ``dtype``.

    A fill of finfo.min swamps the score it is added to, and twice the fill is -inf; both stay so.
    """
    wide = array.astype(dtype)
    narrow_limits, limits = ml_dtypes.finfo(array.dtype), ml_dtypes.finfo(dtype)
    for narrow, limit in ((narrow_limits.min, limits.min), (narrow_limits.max, limits.max)):
        if (found := array == narrow).any():
            wide[found] = limit
    return wide


def is_float(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is a float type of NumPy or ml_dtypes."""
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    for function in model.functions.values():
        yield from ir.traversal.RecursiveGraphIterator(function)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Every value once: inputs and initializers of all graphs, and what nodes make."""
    for graph in model.graphs():
        yield from graph.inputs
        yield from (v for v in graph.initializers.values() if not v.is_graph_input())
    for function in model.functions.values():
        yield from function.inputs
    for node in _nodes(model):
        yield from node.outputs
