# SPDX-License-Identifier: Apache-2.0
"""The README's memory table is measured, the plugin's scratch is linear in the length, and only the table changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from contract.reference import attention
from onnx.reference import ReferenceEvaluator

from flash_trt import backends, plugin_library
from flash_trt.backends import Backend

ROWS = 9


@pytest.fixture(scope="module")
def rtx() -> Backend:
    """TensorRT for RTX with our plugin."""
    backend = backends.load("tensorrt-rtx")
    plugin_library.load(backend)
    return backend


@pytest.fixture(scope="module")
def memory_table(repo_root: Path) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("memory_table", repo_root / "scripts" / "memory_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["memory_table"] = module
    sys.path.insert(0, str(repo_root / "scripts"))  # where it looks for attention_graphs.py
    spec.loader.exec_module(module)
    assert len(module.ROWS) == ROWS
    return module


def test_the_plugins_scratch_is_linear_in_the_length(memory_table: ModuleType) -> None:
    row_bytes = memory_table.HEADS * memory_table.HEAD_DIM * 4
    fused = [row for row in memory_table.ROWS if row.fused is not None and not row.masked]
    assert len(fused) == ROWS - 2
    for row in memory_table.measure((255, 1020), fused):
        assert row.fused[1020] <= 4 * row_bytes * 1020, row.title
        assert row.fused[1020] <= 4 * row.fused[255] + 4096, row.title


def test_a_mask_for_each_head_is_kept_once_with_the_plugin(memory_table: ModuleType) -> None:
    (row,) = memory_table.measure((1020,), [row for row in memory_table.ROWS if row.masked])
    bias = memory_table.HEADS * 1020 * 1020 * 2
    assert bias <= row.fused[1020] <= 1.1 * bias
    assert row.unfused[1020] >= bias
    assert row.by == "TensorRT's own fused kernel"


def test_packed_sequences_are_tried_with_tensorrts_own_attention(memory_table: ModuleType, rtx: Backend) -> None:
    note = memory_table.varlen_note(rtx)
    assert note.endswith("does not build: no fused kernel is available.")
    assert memory_table.table([], (), "1.7", note).splitlines()[-1] == note


def test_pytorchs_legacy_exporter_upcasts_what_tensorrt_then_does_not_fuse(memory_table: ModuleType) -> None:
    (row,) = memory_table.measure((777,), [r for r in memory_table.ROWS if "legacy exporter" in r.title])
    assert row.unfused[777] >= memory_table.HEADS * 777 * 777 * 4
    assert (row.by, row.refusal) == ("an unfused chain", "")


def test_a_row_that_tensorrt_does_not_fuse_holds_the_scores(memory_table: ModuleType) -> None:
    (row,) = memory_table.measure((777,), [r for r in memory_table.ROWS if r.title == "causal, fp32"])
    assert row.unfused[777] >= memory_table.HEADS * 777 * 777 * 4
    assert row.by == "an unfused chain"


def test_a_row_that_tensorrt_fuses_is_told_as_its_own_kernels(memory_table: ModuleType) -> None:
    (row,) = memory_table.measure((777,), [r for r in memory_table.ROWS if r.title == "causal, fp16"])
    assert row.by == "TensorRT's own fused kernel"


def test_a_head_dim_past_the_kernels_stays_with_its_reason(memory_table: ModuleType) -> None:
    (row,) = memory_table.measure((255,), [r for r in memory_table.ROWS if r.fused is None])
    assert row.fused == row.unfused
    assert row.unfused[255] >= memory_table.HEADS * 255 * 255 * 2
    text = memory_table.table([row], (255,), "1.7")
    assert f"| causal, head dim 320, fp16 | an unfused chain | {memory_table.spell(row.unfused[255])}, stays |" in text
    assert "causal, head dim 320, fp16: not fused (`head_dim_large`: " in text
    assert "**" not in text


def test_a_node_that_flash_export_would_not_write_is_told_to_be_written_by_hand(memory_table: ModuleType) -> None:
    refused = {row.title: memory_table.refusal_of(row) for row in memory_table.ROWS if memory_table.refusal_of(row)}
    assert list(refused) == ["log-sum-exp as an output, fp16", "causal, head dim 320, fp16"]
    (row,) = memory_table.measure((255,), [row for row in memory_table.ROWS if row.lse])
    text = memory_table.table([row], (255,), "1.7")
    assert (
        "log-sum-exp as an output, fp16: not fused by flash-export, the node is written by hand (`scores_used`" in text
    )


@pytest.mark.parametrize("index", range(ROWS))
def test_both_graphs_of_a_row_stand_for_the_same_attention(memory_table: ModuleType, index: int) -> None:
    row, length = memory_table.ROWS[index], 37
    if row.fused is None:
        assert "`head_dim_large`" in memory_table.refusal_of(row)
        return
    rng = np.random.default_rng(index)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(row.dtype)
    shape = (memory_table.BATCH, memory_table.HEADS, length, memory_table.HEAD_DIM)
    inputs = {name: rng.standard_normal(shape).astype(dtype) for name in ("query", "key", "value")}
    visible = rng.random((*shape[:3], length)) > 0.3
    visible[..., 0] = True  # a row that sees nothing is NaN in the one and 0 in the other
    if row.masked:
        inputs["mask"] = visible
    outputs = ReferenceEvaluator(memory_table.model_of(row, row.unfused, length)).run(None, inputs)

    graph = memory_table.model_of(row, row.fused, length).graph
    *before, node = graph.node
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    wide = [inputs[name].astype(np.float64) for name in ("query", "key", "value")]
    output, lse = attention(
        *wide,
        scale=attributes["scale"],
        causal=attributes["causal"],
        softcap=attributes["softcap"],
        bias=_bias(before, graph, visible) if attributes["has_bias"] else None,
        sinks=constants["sinks"].astype(np.float64) if attributes["has_sinks"] else None,
    )
    rounding = 4 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(outputs[0].astype(np.float64), output, atol=rounding * np.abs(output).max())
    if row.lse:
        np.testing.assert_allclose(outputs[1].astype(np.float64), lse, atol=rounding * np.abs(lse).max())


def _bias(nodes: list[onnx.NodeProto], graph: onnx.GraphProto, mask: np.ndarray) -> np.ndarray:
    """What ``nodes``, those before the FlashAttention node, make of the mask."""
    given = [value for value in graph.input if value.name == "mask"]
    made = [onnx.helper.make_tensor_value_info("bias", onnx.TensorProto.FLOAT16, None)]
    part = onnx.helper.make_graph(nodes, "bias", given, made, graph.initializer)
    (bias,) = ReferenceEvaluator(onnx.helper.make_model(part)).run(None, {"mask": mask})
    return bias.astype(np.float64)


def test_only_the_text_between_the_markers_changes(memory_table: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{memory_table.BEGIN}\nold\n{memory_table.END}\nafter\n", encoding="utf-8")
    memory_table.rewrite(readme, "new")
    assert readme.read_text(encoding="utf-8") == f"before\n{memory_table.BEGIN}\nnew\n{memory_table.END}\nafter\n"


def test_a_readme_without_markers_is_refused(memory_table: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here", encoding="utf-8")
    with pytest.raises(SystemExit, match="lacks the markers"):
        memory_table.rewrite(readme, "new")
    assert readme.read_text(encoding="utf-8") == "nothing here"


def test_the_readme_holds_every_row(memory_table: ModuleType, repo_root: Path) -> None:
    text = (repo_root / "README.md").read_text(encoding="utf-8")
    table = text.partition(memory_table.BEGIN)[2].partition(memory_table.END)[0]
    for row in memory_table.ROWS:
        assert f"| {row.title} |" in table
    assert "packed sequences (`IAttention`, `PACKED_NHD`) does not build" in table


def test_sizes_are_spelled_in_mib(memory_table: ModuleType) -> None:
    spelled = [memory_table.spell(size) for size in (0, 5000, 2**20, 5 * 2**19, 12928 * 2**20)]
    assert spelled == ["0", "under 0.1", "1", "2.5", "12,928"]
