# SPDX-License-Identifier: Apache-2.0
"""The operator's contract in Python: names, inputs, outputs, attributes and the ONNX schemas.

``docs/op.md`` is its definition in words and ``plugin/op.h`` its twin; ``tests/contract/`` compares the three.
Importing this module registers the schemas, so ``onnx.checker`` with ``check_custom_domain=True`` judges our nodes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import onnx
import onnx.defs

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
OPERATORS = {o.name: o for o in (FLASH_ATTENTION, FLASH_ATTENTION_EX, FLASH_ATTENTION_PACKED)}

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

    @property
    def causal_kind(self) -> Causal:
        """``"none"``, ``"top_left"`` or ``"bottom_right"``."""
        if not self.causal:
            return "none"
        return "bottom_right" if self.diagonal else "top_left"


_INPUT_TYPES = {"kv_lengths": "L", "sinks": "F", "lse": "F", "bias": "BIAS"}


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
    return onnx.defs.OpSchema(
        operator.name,
        DOMAIN,
        VERSION,
        doc="Exact softmax attention; see docs/op.md.",
        inputs=[parameter(name) for name in operator.inputs],
        outputs=[parameter(name) for name in operator.outputs],
        attributes=attributes,
        type_constraints=[c for c in constraints if c[0] in used],
    )


def register_schemas() -> None:
    """Registers the three schemas with onnx, once a process."""
    for operator in OPERATORS.values():
        if not onnx.defs.has(operator.name, DOMAIN):
            onnx.defs.register_schema(_schema(operator))


register_schemas()
