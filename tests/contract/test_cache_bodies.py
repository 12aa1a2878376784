# SPDX-License-Identifier: Apache-2.0
"""The cache forms' function bodies, the portable meaning of the nodes, against float64 in every runtime here."""

from __future__ import annotations

import onnx
import pytest
from onnx import shape_inference

from contract import cache_cases
from contract.cache_cases import CACHE_CASES, CacheCase
from contract.cache_model import feeds, node_of, why_wrong
from contract.implementations import run_in_onnxruntime
from contract.node_model import model_of
from flash_export.errors import UnsupportedModel
from flash_export.function_body import functions_for

BY_NAME = {case.name: case for case in CACHE_CASES}
OPSETS = (11, 12, 13, 15, 18, 23)


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda c: c.name)
def test_the_body_is_right_in_onnx_runtime_at_every_opset(case: CacheCase) -> None:
    tensors = cache_cases.make(case)
    wrong = {}
    for opset in OPSETS:
        if case.dtype == "bf16" and opset < 13:
            continue  # ONNX casts to and from bf16 since 13.
        outputs = run_in_onnxruntime(model_of([node_of(tensors)], opset), feeds(tensors))
        if reasons := why_wrong(tensors, outputs):
            wrong[opset] = reasons
    assert wrong == {}


@pytest.mark.parametrize("name", ["everything", "heads_last_paged", "prompt_into_an_empty_cache_paged"])
def test_the_checker_and_strict_inference_accept_the_node_and_its_body(name: str) -> None:
    model = model_of([node_of(cache_cases.make(BY_NAME[name]))], 18)
    inferred = shape_inference.infer_shapes(model, strict_mode=True, check_type=True, data_prop=True)
    onnx.checker.check_model(inferred, full_check=True, check_custom_domain=True)
    shapes = {o.name: [d.dim_param or d.dim_value for d in o.type.tensor_type.shape.dim] for o in inferred.graph.output}
    assert shapes["kv_lengths_out"] == ["query_0"]
    assert shapes["key_cache_out"] == [f"key_cache_{axis}" for axis in range(len(shapes["key_cache_out"]))]
    assert shapes["value_cache_out"] == [f"value_cache_{axis}" for axis in range(len(shapes["value_cache_out"]))]


def test_without_lengths_the_schema_refuses_the_node() -> None:
    node = node_of(cache_cases.make(BY_NAME["decode"]))
    model = model_of([node], 18)
    del model.functions[:]
    next(a for a in model.graph.node[0].attribute if a.name == "has_kv_lengths").i = 0
    with pytest.raises(Exception, match="has_kv_lengths is 0"):
        shape_inference.infer_shapes(model, strict_mode=True, check_type=True)


def test_caches_of_both_layouts_in_one_file_are_refused() -> None:
    nodes = [node_of(cache_cases.make(BY_NAME[name]), name) for name in ("decode", "heads_last")]
    with pytest.raises(UnsupportedModel, match="nodes of both layouts"):
        functions_for(nodes, 18)
