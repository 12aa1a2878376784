# SPDX-License-Identifier: Apache-2.0
"""The built library in the real plugin registry of TensorRT for RTX, and in engines that it builds without a GPU."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from flash_export.op import CACHE_OPERATORS, FLOAT_ATTRIBUTES, INT_ATTRIBUTES, OPERATORS, Attributes
from flash_export.requirements import pip_install
from flash_trt.plan import plugin_records

CHILD = Path(__file__).with_name("registry_child.py")
HALF, BF16, FLOAT, INT = TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.INT32

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason=f"TensorRT for RTX is not installed: {pip_install('rtx')}",
)

OUTPUT_TYPES = {"lse": FLOAT, "kv_lengths_out": INT}
Inputs = dict[str, tuple[int, list[int | str]]]
Shapes = dict[str, list[list[int]]]

SEPARATE: Inputs = {
    "q": (HALF, ["B", "S", 8 * 40]),
    "k": (HALF, ["B", "K", 2 * 40]),
    "v": (HALF, ["B", "K", 2 * 56]),
}
SEPARATE_SHAPES: Shapes = {
    "q": [[1, 1, 320], [2, 33, 320], [4, 257, 320]],
    "k": [[1, 1, 80], [2, 65, 80], [4, 513, 80]],
    "v": [[1, 1, 112], [2, 65, 112], [4, 513, 112]],
}


def make_model(operator: str, attributes: dict[str, Any], inputs: Inputs, outputs: list[str]) -> bytes:
    """One node; every input of it is an input of the graph, every output an output."""
    dtype = next(iter(inputs.values()))[0]
    node = helper.make_node(operator, list(inputs), outputs, name="attn_7", domain="flash_export", **attributes)
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, OUTPUT_TYPES.get(name, dtype), None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("flash_export", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return model.SerializeToString()


def run_child(
    native_build: Path, folder: Path, model: bytes, shapes: Shapes, *flags: str
) -> tuple[dict[str, Any], str, bytes]:
    """What the child saw, what it said, and the plan ("" when none came)."""
    (folder / "model.onnx").write_bytes(model)
    plan = folder / "plan"
    command = [sys.executable, str(CHILD), str(native_build / "lib"), str(folder / "model.onnx"), str(plan)]
    command += [json.dumps(shapes), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return json.loads(done.stdout.splitlines()[-1]), said, plan.read_bytes() if plan.exists() else b""


def serialised(attributes: Attributes) -> dict[str, bytes]:
    """The fields as the plugin must have written them into the plan."""
    ints = {name: struct.pack("<i", getattr(attributes, name)) for name in INT_ATTRIBUTES}
    return ints | {name: struct.pack("<f", getattr(attributes, name)) for name in FLOAT_ATTRIBUTES}


PLAIN = Attributes(8, 2, 0.31, causal=1, diagonal=1, window_left=77)
EX = Attributes(6, 3, 0.125, layout=1, softcap=30.0, has_bias=1, has_kv_lengths=1, has_sinks=1)
PACKED = Attributes(5, 5, 0.2, causal=1)
EX_INPUTS: Inputs = {
    "q": (HALF, [2, 6, 9, 40]),
    "k": (HALF, [2, 3, 17, 40]),
    "v": (HALF, [2, 3, 17, 24]),
    "bias": (FLOAT, [1, 6, 9, 17]),
    "kv_lengths": (INT, [2]),
    "sinks": (FLOAT, [6]),
}


@pytest.mark.parametrize(
    ("operator", "attributes", "inputs", "shapes", "outputs"),
    [
        ("FlashAttention", PLAIN, SEPARATE, SEPARATE_SHAPES, {"o": [-1, -1, 8 * 56]}),
        ("FlashAttentionEx", EX, EX_INPUTS, {}, {"o": [2, 6, 9, 24], "lse": [2, 6, 9]}),
        (
            "FlashAttentionPacked",
            PACKED,
            {"qkv": (BF16, ["B", "S", 15 * 24])},
            {"qkv": [[1, 1, 360], [2, 50, 360], [2, 129, 360]]},
            {"o": [-1, -1, 5 * 24]},
        ),
    ],
    ids=["plain", "ex", "packed"],
)
def test_an_engine_holds_the_plugin_with_its_attributes(
    native_build: Path,
    tmp_path: Path,
    operator: str,
    attributes: Attributes,
    inputs: Inputs,
    shapes: Shapes,
    outputs: dict[str, list[int]],
) -> None:
    model = make_model(operator, attributes.as_dict(), inputs, list(outputs))
    seen, said, plan = run_child(native_build, tmp_path, model, shapes)
    assert seen["built"], said
    assert seen["layers"] == ["LayerType.PLUGIN_V3"]
    assert seen["outputs"] == list(outputs.values())
    records = plugin_records(plan)
    assert {record.operator for record in records} == {operator}
    assert all(record.fields == serialised(attributes) for record in records), records


CACHE = Attributes(8, 2, 0.31, causal=1, diagonal=1, has_kv_lengths=1)
CACHE_OUTPUTS: dict[str, list[int]] = {
    "o": [-1, -1, 8 * 56],
    "lse": [-1, 8, -1],
    "kv_lengths_out": [-1],
    "key_cache_out": [-1, -1, 80],
    "value_cache_out": [-1, -1, 112],
}


def cache_inputs(*, paged: bool) -> tuple[Inputs, Shapes]:
    """A cache form's inputs in layout 0 and a profile of them: decoding and a prompt."""
    outer, rows = ("P", 16) if paged else ("B", "C")
    inputs: Inputs = {name: (HALF, list(shape)) for name, (_, shape) in SEPARATE.items()} | {
        "bias": (HALF, [1, 1, 1, 1]),
        "kv_lengths": (INT, ["B"]),
        "sinks": (FLOAT, [1]),
        "key_cache": (HALF, [outer, rows, 80]),
        "value_cache": (HALF, [outer, rows, 112]),
    }
    shapes = {
        name: [[1, 1, width], [2, 1, width], [4, 65, width]] for name, width in (("q", 320), ("k", 80), ("v", 112))
    }
    sizes = [[2, 16], [6, 16], [64, 16]] if paged else [[1, 1], [2, 256], [4, 1024]]
    shapes |= {f"{name}_cache": [[*s, width] for s in sizes] for name, width in (("key", 80), ("value", 112))}
    shapes["kv_lengths"] = [[1], [2], [4]]
    if paged:
        inputs["page_table"] = (INT, ["B", "W"])
        shapes["page_table"] = [[1, 1], [2, 3], [4, 64]]
    return inputs, shapes


@pytest.mark.parametrize("operator", CACHE_OPERATORS)
def test_an_engine_holds_a_cache_form_whose_outputs_are_its_inputs_memory(
    native_build: Path, tmp_path: Path, operator: str
) -> None:
    inputs, shapes = cache_inputs(paged=operator == "FlashAttentionPagedCache")
    model = make_model(operator, CACHE.as_dict(), inputs, list(CACHE_OUTPUTS))
    seen, said, plan = run_child(native_build, tmp_path, model, shapes, "alias")
    assert seen["built"], said
    assert seen["layers"] == ["LayerType.PLUGIN_V3"]
    paged = {"key_cache_out": [-1, 16, 80], "value_cache_out": [-1, 16, 112]} if "page_table" in inputs else {}
    assert seen["outputs"] == list((CACHE_OUTPUTS | paged).values())
    records = plugin_records(plan)
    assert {record.operator for record in records} == {operator}
    assert all(record.fields == serialised(CACHE) for record in records), records


def test_without_the_preview_feature_tensorrt_itself_refuses_the_alias(native_build: Path, tmp_path: Path) -> None:
    inputs, shapes = cache_inputs(paged=False)
    model = make_model("FlashAttentionCache", CACHE.as_dict(), inputs, list(CACHE_OUTPUTS))
    seen, said, _ = run_child(native_build, tmp_path, model, shapes)
    assert "Aliased I/O used by plugin attn_7" in said
    assert not seen["built"]


def test_the_registry_takes_every_operator(native_build: Path, tmp_path: Path) -> None:
    model = make_model("FlashAttention", PLAIN.as_dict(), SEPARATE, ["o"])
    seen, said, _ = run_child(native_build, tmp_path, model, SEPARATE_SHAPES)
    assert seen["loaded"], said
    ours = sorted(creator for creator in seen["creators"] if creator[1] == "flash_export")
    assert ours == sorted([name, "flash_export", "1"] for name in OPERATORS)


WRONG_NODES: dict[str, tuple[dict[str, Any], Inputs, str]] = {
    "missing": ({"scale": None}, {}, "attribute scale\n  got   nothing"),
    "range": ({"causal": 2}, {}, "attribute causal\n  got   2\n  need  one INT32 in 0 to 1"),
    "int_for_float": ({"scale": 1}, {}, "attribute scale\n  got   field type 5"),
    "list_for_int": ({"q_num_heads": [8, 8]}, {}, "attribute q_num_heads\n  got   field type 5, length 2"),
    "heads": ({"q_num_heads": 7}, {}, "7 query heads, 2 key and value heads"),
    "side_inputs": ({"has_bias": 1}, {}, "0, or the operator FlashAttentionEx"),
    "layout": ({"layout": 1}, {}, "[B, 8, S, D] (layout 1)"),
    "rank": ({}, {"v": (HALF, ["B", 2, "K", 56])}, "tensor value\n  got   shape [?, 2, ?, 56]"),
    "dtype": ({}, {"k": (FLOAT, ["B", "K", 80])}, "tensor key\n  got   fp32"),
}
"""Changed attributes (None: left out), changed inputs, what the plugin must say."""


@pytest.mark.parametrize(("attributes", "inputs", "message"), WRONG_NODES.values(), ids=WRONG_NODES)
def test_a_wrong_node_is_refused_while_parsing(
    native_build: Path, tmp_path: Path, attributes: dict[str, Any], inputs: Inputs, message: str
) -> None:
    written = {name: value for name, value in (PLAIN.as_dict() | attributes).items() if value is not None}
    model = make_model("FlashAttention", written, SEPARATE | inputs, ["o"])
    seen, said, plan = run_child(native_build, tmp_path, model, {})
    assert message in said
    assert 'node "attn_7"' in said
    assert not seen["built"]
    assert plan == b""


OWN_DIMS: Inputs = {
    name: (dtype, [f"{name}_{axis}" if isinstance(axis, str) else axis for axis in shape])
    for name, (dtype, shape) in SEPARATE.items()
}
"""The same inputs, their dynamic dims unrelated to each other as far as the model says."""


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        pytest.param(
            SEPARATE_SHAPES | {"k": [[1, 1, 80], [3, 65, 80], [4, 513, 80]]}, "tensor key\n  got   batch 3", id="batch"
        ),
        pytest.param(
            SEPARATE_SHAPES | {"v": [[1, 1, 112], [2, 64, 112], [4, 513, 112]]},
            "tensor value\n  got   batch 2, sequence 64",
            id="sequence",
        ),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_while_building(
    native_build: Path, tmp_path: Path, shapes: Shapes, message: str
) -> None:
    model = make_model("FlashAttention", PLAIN.as_dict(), OWN_DIMS, ["o"])
    seen, said, _ = run_child(native_build, tmp_path, model, shapes)
    assert message in said
    assert not seen["built"]


def test_bounds_of_a_profile_need_not_agree(native_build: Path, tmp_path: Path) -> None:
    shapes = SEPARATE_SHAPES | {"k": [[1, 1, 80], [2, 65, 80], [8, 600, 80]]}
    model = make_model("FlashAttention", PLAIN.as_dict(), OWN_DIMS, ["o"])
    seen, said, _ = run_child(native_build, tmp_path, model, shapes)
    assert seen["built"], said
