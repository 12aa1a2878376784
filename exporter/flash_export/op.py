# SPDX-License-Identifier: Apache-2.0
"""The operator's contract in Python: names, inputs, outputs, attributes and the ONNX schemas.

``docs/op.md`` is its definition in words and ``plugin/op.h`` its twin; ``tests/contract/`` compares the three.
Importing this module registers the schemas, so ``onnx.checker`` with ``check_custom_domain=True`` judges our nodes:
names, arity and attributes always, values and shapes too with ``full_check=True``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import onnx
import onnx.defs
from onnx.shape_inference import InferenceContext, InferenceError

DOMAIN = "flash_export"
VERSION = 1

Causal = Literal["none", "top_left", "bottom_right"]
Layout = Literal[0, 1]

LAYOUT_BSHD: Layout = 0
"""``[B, S, H*D]``, heads side by side in the last axis."""
LAYOUT_BHSD: Layout = 1
"""``[B, H, S, D]``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """One operator name with its fixed arity. An input is never omitted, an output always named."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


FLASH_ATTENTION = Operator("FlashAttention", ("query", "key", "value"), ("output",))
FLASH_ATTENTION_EX = Operator(
    "FlashAttentionEx", ("query", "key", "value", "bias", "kv_lengths", "sinks"), ("output", "lse")
)
FLASH_ATTENTION_PACKED = Operator("FlashAttentionPacked", ("qkv",), ("output",))
FLASH_ATTENTION_CACHE = Operator(
    "FlashAttentionCache",
    (*FLASH_ATTENTION_EX.inputs, "key_cache", "value_cache"),
    (*FLASH_ATTENTION_EX.outputs, "kv_lengths_out", "key_cache_out", "value_cache_out"),
)
FLASH_ATTENTION_PAGED_CACHE = Operator(
    "FlashAttentionPagedCache", (*FLASH_ATTENTION_CACHE.inputs, "page_table"), FLASH_ATTENTION_CACHE.outputs
)
CACHE_OPERATORS = {o.name: o for o in (FLASH_ATTENTION_CACHE, FLASH_ATTENTION_PAGED_CACHE)}
"""The cache forms, in a section of the page of their own: they change a cache before they attend to it."""
ATTENTION_OPERATORS = {o.name: o for o in (FLASH_ATTENTION, FLASH_ATTENTION_EX, FLASH_ATTENTION_PACKED)}
OPERATORS = ATTENTION_OPERATORS | CACHE_OPERATORS

INT_ATTRIBUTES: dict[str, tuple[int, int]] = {
    "layout": (0, 1),
    "q_num_heads": (1, 65535),
    "kv_num_heads": (1, 65535),
    "causal": (0, 1),
    "diagonal": (0, 1),
    "window_left": (-1, 2**31 - 1),
    "window_right": (-1, 2**31 - 1),
    "has_bias": (0, 1),
    "has_kv_lengths": (0, 1),
    "has_sinks": (0, 1),
}
"""Name -> (smallest, largest). Every operator carries all of them, always written out."""

FLOAT_ATTRIBUTES: dict[str, tuple[float, float]] = {"scale": (-1e30, 1e30), "softcap": (0.0, 1e30)}
"""Name -> (smallest, largest); always finite."""

STRING_ATTRIBUTES: dict[str, str] = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION)}
"""What TensorRT's parser looks the plugin up by; without them it silently takes the function body."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of one FlashAttention node; see ``docs/op.md``.

    Raises:
        ValueError: a value is outside the contract's range, or q_num_heads is no multiple of kv_num_heads.
    """

    q_num_heads: int
    kv_num_heads: int
    scale: float
    layout: int = LAYOUT_BSHD
    softcap: float = 0.0
    causal: int = 0
    diagonal: int = 0
    window_left: int = -1
    window_right: int = -1
    has_bias: int = 0
    has_kv_lengths: int = 0
    has_sinks: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in (INT_ATTRIBUTES | FLOAT_ATTRIBUTES).items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; {DOMAIN} needs {low} to {high}")
        if self.q_num_heads % self.kv_num_heads:
            raise ValueError(f"q_num_heads {self.q_num_heads} is no multiple of kv_num_heads {self.kv_num_heads}")

    def as_dict(self) -> dict[str, int | float | str]:
        """Every attribute that a node must carry, ``plugin_namespace`` and ``plugin_version`` included."""
        return {**dataclasses.asdict(self), **STRING_ATTRIBUTES}

    def why_not_of(self, operator: Operator) -> str | None:
        """Why a node of ``operator`` cannot carry these attributes, one sentence; None: it can."""
        if "bias" not in operator.inputs and (self.has_bias or self.has_kv_lengths or self.has_sinks):
            return f"{operator.name} has no side inputs; has_bias, has_kv_lengths and has_sinks must be 0"
        if operator.name in CACHE_OPERATORS and not self.has_kv_lengths:
            return f"has_kv_lengths is 0; {operator.name} needs kv_lengths, which say what the cache holds"
        if operator == FLASH_ATTENTION_PACKED and self.layout != LAYOUT_BSHD:
            return f"layout is {self.layout}; {operator.name} takes [B, S, (Hq + 2*Hkv)*D] alone, layout 0"
        return None

    @property
    def causal_kind(self) -> Causal:
        """``"none"``, ``"top_left"`` or ``"bottom_right"``."""
        if not self.causal:
            return "none"
        return "bottom_right" if self.diagonal else "top_left"


_INPUT_TYPES = {
    "kv_lengths": "L",
    "kv_lengths_out": "L",
    "page_table": "L",
    "sinks": "F",
    "lse": "F",
    "bias": "BIAS",
}


Dims = list[onnx.TensorShapeProto.Dimension]
INPUT_RANKS = {"bias": 4, "kv_lengths": 1, "sinks": 1, "qkv": 3, "page_table": 2}
"""The rank of inputs that have one whatever the layout."""


def _inference(operator: Operator) -> Callable[[InferenceContext], None]:
    """Type and shape inference of one operator; with it a file without function bodies has shapes too."""

    def infer(context: InferenceContext) -> None:
        attributes = _attributes_of(operator, context)
        dims = {name: _dims_of(operator, context, i, attributes) for i, name in enumerate(operator.inputs)}
        dtype = context.get_input_type(0).tensor_type.elem_type
        _set_output(context, 0, dtype, _output_dims(attributes, dims))
        if "lse" in operator.outputs:
            query = dims["query"]
            heads = onnx.TensorShapeProto.Dimension(dim_value=attributes.q_num_heads)
            sequence = 2 if attributes.layout == LAYOUT_BHSD else 1
            lse = None if query is None else [query[0], heads, query[sequence]]
            _set_output(context, 1, onnx.TensorProto.FLOAT, lse)
        if operator.name in CACHE_OPERATORS:
            _set_output(context, 2, onnx.TensorProto.INT32, None if query is None else query[:1])
            _set_output(context, 3, dtype, dims["key_cache"])
            _set_output(context, 4, dtype, dims["value_cache"])

    return infer


def _attributes_of(operator: Operator, context: InferenceContext) -> Attributes:
    given = {name: context.get_attribute(name) for name in [*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES]}
    if missing := [name for name, value in given.items() if value is None]:
        raise InferenceError(f"{operator.name}: attributes missing: {', '.join(missing)}")
    try:
        attributes = Attributes(**{name: onnx.helper.get_attribute_value(value) for name, value in given.items()})
    except ValueError as error:
        raise InferenceError(f"{operator.name}: {error}") from error
    if reason := attributes.why_not_of(operator):
        raise InferenceError(reason)
    return attributes


def _dims_of(operator: Operator, context: InferenceContext, index: int, attributes: Attributes) -> Dims | None:
    """The input's dims, its rank and heads checked; None when nothing is known of its shape."""
    tensor = context.get_input_type(index).tensor_type
    if not tensor.HasField("shape"):
        return None
    name, dims = operator.inputs[index], list(tensor.shape.dim)
    rank = INPUT_RANKS.get(name, 4 if attributes.layout == LAYOUT_BHSD else 3)
    if len(dims) != rank:
        raise InferenceError(f"{operator.name}: {name} has rank {len(dims)}; layout {attributes.layout} needs {rank}")
    if name not in ("query", "key", "value", "qkv", "key_cache", "value_cache"):
        return dims
    of_kv = 2 * attributes.kv_num_heads if name == "qkv" else 0
    heads = attributes.q_num_heads + of_kv if name in ("query", "qkv") else attributes.kv_num_heads
    axis = 1 if attributes.layout == LAYOUT_BHSD else 2
    size = dims[axis].dim_value if dims[axis].HasField("dim_value") else None
    if size is not None and (size != heads if axis == 1 else size % heads):
        need = f"{heads}" if axis == 1 else f"a multiple of {heads} heads"
        raise InferenceError(f"{operator.name}: axis {axis} of {name} is {size}; it must be {need}")
    return dims


def _output_dims(attributes: Attributes, dims: dict[str, Dims | None]) -> Dims | None:
    first = dims.get("query", dims.get("qkv"))
    if first is None:
        return None
    value, last = dims.get("value"), onnx.TensorShapeProto.Dimension()
    if attributes.layout == LAYOUT_BHSD:
        if value is not None:
            last = value[3]
    else:
        heads = attributes.kv_num_heads if "value" in dims else attributes.q_num_heads + 2 * attributes.kv_num_heads
        joined = value if "value" in dims else first
        if joined is not None and joined[2].HasField("dim_value"):
            last.dim_value = joined[2].dim_value // heads * attributes.q_num_heads
    return [*first[:-1], last]


def _set_output(context: InferenceContext, index: int, dtype: int, dims: Dims | None) -> None:
    output = onnx.TypeProto()
    output.tensor_type.elem_type = dtype
    if dims is not None:
        output.tensor_type.shape.SetInParent()
        output.tensor_type.shape.dim.extend(dims)
    context.set_output_type(index, output)


def _schema(operator: Operator) -> onnx.defs.OpSchema:
    def parameter(name: str) -> onnx.defs.OpSchema.FormalParameter:
        return onnx.defs.OpSchema.FormalParameter(name, _INPUT_TYPES.get(name, "T"))

    attributes = [
        onnx.defs.OpSchema.Attribute(name, kind, required=True)
        for kind, names in (
            (onnx.defs.OpSchema.AttrType.INT, INT_ATTRIBUTES),
            (onnx.defs.OpSchema.AttrType.FLOAT, FLOAT_ATTRIBUTES),
            (onnx.defs.OpSchema.AttrType.STRING, STRING_ATTRIBUTES),
        )
        for name in names
    ]
    used = {_INPUT_TYPES.get(name, "T") for name in operator.inputs + operator.outputs}
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    constraints = [
        ("T", floats, "element type of query, key, value and output"),
        ("BIAS", floats, "the query's type or float"),
        ("L", ["tensor(int32)"], "lengths"),
        ("F", ["tensor(float)"], "float side tensors"),
    ]
    schema = onnx.defs.OpSchema(
        operator.name,
        DOMAIN,
        VERSION,
        doc="Exact softmax attention; see docs/op.md.",
        inputs=[parameter(name) for name in operator.inputs],
        outputs=[parameter(name) for name in operator.outputs],
        attributes=attributes,
        type_constraints=[c for c in constraints if c[0] in used],
    )
    schema.set_type_and_shape_inference_function(_inference(operator))
    return schema


def register_schemas() -> None:
    """Registers the schemas with onnx, once a process."""
    for operator in OPERATORS.values():
        if not onnx.defs.has(operator.name, DOMAIN):
            onnx.defs.register_schema(_schema(operator))


register_schemas()
