# SPDX-License-Identifier: Apache-2.0
"""The schemas judge a FlashAttention node: names, arity, attributes, shapes."""

from __future__ import annotations

import math

import onnx
import onnx.checker
import pytest
from onnx import TensorProto, helper

from flash_export import op
from flash_export.op import FLASH_ATTENTION, FLASH_ATTENTION_EX, FLASH_ATTENTION_PACKED, Attributes

SHAPES: dict[str, list[int | str]] = {
    "query": ["batch", "seqlen_q", 6 * 8],
    "key": ["batch", "seqlen_kv", 2 * 8],
    "value": ["batch", "seqlen_kv", 2 * 5],
    "qkv": ["batch", "seqlen", 10 * 8],
    "bias": [1, 1, "seqlen_q", "seqlen_kv"],
    "kv_lengths": ["batch"],
    "sinks": [6],
}
BHSD: dict[str, list[int | str]] = {
    "query": ["batch", 6, "seqlen_q", 8],
    "key": ["batch", 2, "seqlen_kv", 8],
    "value": ["batch", 2, "seqlen_kv", 5],
}
ATTRIBUTES = Attributes(q_num_heads=6, kv_num_heads=2, scale=0.25).as_dict()
ELEMENT_TYPES = {"kv_lengths": TensorProto.INT32, "sinks": TensorProto.FLOAT}


def model(
    name: str, *, attributes: dict | None = None, shapes: dict | None = None, inputs: list[str] | None = None
) -> onnx.ModelProto:
    """A model of one node without a function body, its outputs' dims unknown."""
    operator = op.OPERATORS.get(name, FLASH_ATTENTION)
    given = SHAPES | (shapes or {})
    names = list(operator.inputs) if inputs is None else inputs
    node_attributes = attributes or ATTRIBUTES
    node = helper.make_node(name, names, list(operator.outputs), domain=op.DOMAIN, **node_attributes)
    kind = TensorProto.BFLOAT16
    ranks = {"output": 4 if node_attributes.get("layout") else 3, "lse": 3}
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(n, ELEMENT_TYPES.get(n, kind), given[n]) for n in names if n in given],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT if n == "lse" else kind, [None] * ranks[n])
            for n in operator.outputs
        ],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(op.DOMAIN, op.VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def check(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The checker, then strict inference."""
    onnx.checker.check_model(proto, full_check=True, check_custom_domain=True)
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True, check_type=True)


def output_dims(proto: onnx.ModelProto, index: int = 0) -> list[int | str]:
    """The inferred dims of an output."""
    shape = check(proto).graph.output[index].type.tensor_type.shape
    return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in shape.dim]


def test_the_output_has_the_querys_rows_and_the_values_head_dim() -> None:
    assert output_dims(model("FlashAttention")) == ["batch", "seqlen_q", 6 * 5]
    heads_first = ATTRIBUTES | {"layout": 1}
    assert output_dims(model("FlashAttention", attributes=heads_first, shapes=BHSD)) == ["batch", 6, "seqlen_q", 5]
    assert output_dims(model("FlashAttentionPacked")) == ["batch", "seqlen", 6 * 8]


@pytest.mark.parametrize(("layout", "shapes"), [(0, SHAPES), (1, BHSD)])
def test_the_lse_has_one_number_a_query_and_head(layout: int, shapes: dict) -> None:
    proto = model("FlashAttentionEx", attributes=ATTRIBUTES | {"layout": layout}, shapes=shapes)
    assert output_dims(proto, 1) == ["batch", 6, "seqlen_q"]


def test_an_unknown_last_axis_stays_unknown() -> None:
    proto = model("FlashAttention", shapes={"value": ["batch", "seqlen_kv", "joined"]})
    *rows, last = output_dims(proto)
    assert rows == ["batch", "seqlen_q"]
    assert not isinstance(last, int)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("FlashAttention", {"q_num_heads": 5}, "no multiple of kv_num_heads 2"),
        ("FlashAttention", {"q_num_heads": 0}, "q_num_heads is 0"),
        ("FlashAttention", {"causal": 2}, "causal is 2"),
        ("FlashAttention", {"window_left": -2}, "window_left is -2"),
        ("FlashAttention", {"softcap": -1.0}, "softcap is -1.0"),
        ("FlashAttention", {"scale": math.inf}, "scale is inf"),
        ("FlashAttention", {"scale": math.nan}, "scale is nan"),
        ("FlashAttention", {"has_bias": 1}, "FlashAttention has no side inputs"),
        ("FlashAttentionPacked", {"has_sinks": 1}, "FlashAttentionPacked has no side inputs"),
        ("FlashAttentionPacked", {"layout": 1}, "layout is 1"),
    ],
)
def test_a_value_outside_the_contract_is_refused(name: str, change: dict, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        check(model(name, attributes=ATTRIBUTES | change))


@pytest.mark.parametrize(
    ("name", "shapes", "complaint"),
    [
        ("FlashAttention", {"query": ["batch", 6, "seqlen_q", 8]}, "query has rank 4; layout 0 needs 3"),
        ("FlashAttention", {"query": ["batch", "seqlen_q", 49]}, "axis 2 of query is 49; it must be a multiple of 6"),
        ("FlashAttention", {"key": ["batch", "seqlen_kv", 15]}, "axis 2 of key is 15; it must be a multiple of 2"),
        ("FlashAttentionPacked", {"qkv": ["batch", "seqlen", 81]}, "axis 2 of qkv is 81; it must be a multiple of 10"),
        ("FlashAttentionEx", {"bias": ["seqlen_q", "seqlen_kv"]}, "bias has rank 2; layout 0 needs 4"),
    ],
)
def test_a_shape_outside_the_contract_is_refused(name: str, shapes: dict, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        check(model(name, shapes=shapes))


def test_a_wrong_number_of_heads_is_refused_heads_first() -> None:
    shapes = BHSD | {"value": ["batch", 3, "seqlen_kv", 5]}
    with pytest.raises(Exception, match="axis 1 of value is 3; it must be 2"):
        check(model("FlashAttention", attributes=ATTRIBUTES | {"layout": 1}, shapes=shapes))


@pytest.mark.parametrize("attribute", sorted(ATTRIBUTES))
def test_a_missing_attribute_is_refused(attribute: str) -> None:
    with pytest.raises(Exception, match=attribute):
        check(model("FlashAttention", attributes={k: v for k, v in ATTRIBUTES.items() if k != attribute}))


@pytest.mark.parametrize(
    ("name", "change", "inputs"),
    [
        ("FlashAttention", {"banana": 1}, None),
        ("FlashAttention", {}, ["query", "key"]),
        ("FlashAttention", {}, ["query", "key", "value", "bias"]),
        ("FlashAttentionEx", {}, ["query", "key", "value", "bias", "", "sinks"]),
        ("FlashAttentionVarlen", {}, None),
    ],
)
def test_an_unknown_name_attribute_or_arity_is_refused(name: str, change: dict, inputs: list[str] | None) -> None:
    with pytest.raises(Exception, match=name):
        check(model(name, attributes=ATTRIBUTES | change, inputs=inputs))


def test_attributes_say_their_causal_kind() -> None:
    kinds = [Attributes(1, 1, 1.0, causal=c, diagonal=d).causal_kind for c, d in ((0, 1), (1, 0), (1, 1))]
    assert kinds == ["none", "top_left", "bottom_right"]


def test_side_inputs_belong_to_the_extended_name_alone() -> None:
    attributes = Attributes(2, 1, 1.0, has_kv_lengths=1)
    assert attributes.why_not_of(FLASH_ATTENTION_EX) is None
    assert attributes.why_not_of(FLASH_ATTENTION) is not None
    assert attributes.why_not_of(FLASH_ATTENTION_PACKED) is not None
