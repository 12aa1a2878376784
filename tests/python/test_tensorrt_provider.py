# SPDX-License-Identifier: Apache-2.0
"""The form for ONNX Runtime's TensorRT provider: ONNX Runtime takes it with the provider's operators alone, and
NVIDIA's own ONNX parser makes our plugin of every node.

The provider itself is in no package that runs without a GPU; what it registers is declared by a library of the tests.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from contract import cache_cases
from contract.cache_cases import CACHE_CASES
from contract.cache_model import node_of
from contract.node_model import model_of
from onnx import TensorProto, helper
from python.attention_models import BF16, FLOAT, HALF, HEAD_DIM, HEADS, SCALE, flash_node, fused, with_bodies

from flash_export.errors import UnsupportedModel
from flash_export.op import DOMAIN, Attributes
from flash_trt import backends, onnx_file
from flash_trt.backends import Backend
from flash_trt.build import plugin_layers
from flash_trt.onnx_file import PROVIDER_DOMAIN
from flash_trt.tensorrt_provider import provider_model


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """A library with the operators that the provider registers."""
    library = tmp_path_factory.mktemp("provider") / "liboperators.so"
    source = Path(__file__).with_name("tensorrt_provider_operators.cpp")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{repo_root / 'plugin'}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=120)
    return library


def three_operators(path: Path, dtype: int) -> Path:
    """One node of each operator without a cache, a function of a stranger's around one of them, and a branch."""
    flat = ["batch", "seq", HEADS * HEAD_DIM]
    plain = Attributes(q_num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE)
    extended = Attributes(q_num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE, has_bias=1)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    first = helper.make_node("FlashAttention", ["q", "k", "v"], ["y"], name="a", domain=DOMAIN, **plain.as_dict())
    block = helper.make_function("mine", "Block", ["q", "k", "v"], ["y"], [first], opsets)
    side = ["bias", "lengths", "sinks"]
    second = helper.make_node(
        "FlashAttentionEx", ["a", "k", "v", *side], ["b", "lse"], name="b", domain=DOMAIN, **extended.as_dict()
    )
    third = helper.make_node("FlashAttentionPacked", ["qkv"], ["c"], name="c", domain=DOMAIN, **plain.as_dict())
    made = [helper.make_tensor_value_info("c", dtype, flat)]
    kept = helper.make_node("Identity", ["b"], ["d"])
    then = helper.make_graph([helper.make_node("Concat", ["b", "k", "v"], ["qkv"], axis=2), third], "then", [], made)
    otherwise = helper.make_graph([kept], "else", [], [helper.make_tensor_value_info("d", dtype, flat)])
    nodes = [
        helper.make_node("Block", ["q", "k", "v"], ["a"], domain="mine"),
        second,
        helper.make_node("If", ["choice"], ["e"], then_branch=then, else_branch=otherwise),
        helper.make_node("Mul", ["e", "e"], ["output"]),
    ]
    constants = {"lengths": np.array([2**31 - 1], np.int32), "sinks": np.array([-np.inf], np.float32)}
    inputs = [helper.make_tensor_value_info(name, dtype, flat) for name in ("q", "k", "v")]
    inputs += [helper.make_tensor_value_info("bias", dtype, ["batch", 1, 1, "seq"])]
    inputs += [helper.make_tensor_value_info("choice", TensorProto.BOOL, [])]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("output", dtype, flat)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    model = helper.make_model(
        graph, opset_imports=[*opsets, helper.make_opsetid("mine", 1)], ir_version=9, functions=[block]
    )
    onnx.save(with_bodies(model), path)
    return path


def written(source: Path, path: Path) -> Path:
    model, _ = provider_model(onnx_file.read(source))
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["fp32", "fp16"])
def test_onnx_runtime_takes_it_with_the_providers_operators_and_refuses_it_without(
    operators: Path, tmp_path: Path, dtype: int
) -> None:
    path = written(three_operators(tmp_path / "m.onnx", dtype), tmp_path / "p.onnx")
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(operators))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    assert [output.type for output in session.get_outputs()] == [
        "tensor(float)" if dtype == FLOAT else "tensor(float16)"
    ]
    with pytest.raises(Exception, match=r"trt\.plugins.*is not a registered"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_nvidias_parser_makes_our_plugin_of_every_node(rtx: Backend, tmp_path: Path) -> None:
    path = written(three_operators(tmp_path / "m.onnx", HALF), tmp_path / "p.onnx")
    network = backends.create_network(rtx, backends.create_builder(rtx))
    parser = rtx.trt.OnnxParser(network, rtx.logger)
    assert parser.parse_from_file(str(path)), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    found = [operator for _, operator in plugin_layers(rtx, network)]
    assert sorted(found) == ["FlashAttention", "FlashAttentionEx", "FlashAttentionPacked"]


def test_nodes_keep_their_attributes_and_nothing_of_ours_is_left(tmp_path: Path) -> None:
    file = onnx_file.read(three_operators(tmp_path / "m.onnx", HALF))
    model, computed_in = provider_model(file)
    assert computed_in == {HALF}
    assert not model.functions
    assert {opset.domain for opset in model.opset_import} >= {"", PROVIDER_DOMAIN}
    assert DOMAIN not in {opset.domain for opset in model.opset_import}
    then = next(node for node in model.graph.node if node.op_type == "If").attribute
    moved = [node for graph in (model.graph, *(a.g for a in then)) for node in graph.node if node.domain]
    assert {node.domain for node in moved} == {PROVIDER_DOMAIN}
    given = {node.operator: node.attributes for node in file.flash_nodes}
    for node in moved:
        told = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        spelled = {k: v.decode() if isinstance(v, bytes) else v for k, v in told.items()}
        assert spelled == given.pop(node.op_type)
    assert not given


def test_a_file_without_bodies_is_taken_too(operators: Path, tmp_path: Path) -> None:
    path = written(fused(tmp_path / "m.onnx", flash_node(output="a", name="first"), flash_node(("a", "key", "value")),
                         fallback=False), tmp_path / "p.onnx")  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(operators))
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def test_what_the_provider_cannot_be_given_is_refused_with_the_way_that_works(tmp_path: Path) -> None:
    case = cache_cases.make(next(c for c in CACHE_CASES if c.name == "decode"))
    onnx.save(onnx.shape_inference.infer_shapes(model_of([node_of(case)], 18)), tmp_path / "cache.onnx")
    for path, got in ((fused(tmp_path / "b.onnx", dtype=BF16), "bfloat16"), (tmp_path / "cache.onnx", "in place")):
        with pytest.raises(UnsupportedModel) as caught:
            provider_model(onnx_file.read(path))
        assert got in caught.value.got
        assert "flash-trt triton DIR MODEL.engine" in caught.value.do
