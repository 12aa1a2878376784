# SPDX-License-Identifier: Apache-2.0
"""Real engines of models whose lengths are computed: a past that may be empty, and multiples of a length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from python.attention_models import HEAD_DIM, HEADS, OPSET, SCALE, flash_node, with_bodies

from flash_export.errors import EXIT_OK, EXIT_USAGE
from flash_export.op import DOMAIN
from flash_trt.backends import Backend
from flash_trt.output import sidecar_path

Command = Callable[..., int]

SIX_KEYS = f"key:1x{HEADS}x6x{HEAD_DIM},2x{HEADS}x6x{HEAD_DIM},3x{HEADS}x6x{HEAD_DIM}"


def _tensor(name: str, *lengths: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", HEADS, *lengths, HEAD_DIM])


def _saved(path: Path, nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], length: str) -> Path:
    graph = helper.make_graph(nodes, "attention", inputs, [_tensor("output", length)])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    onnx.save(with_bodies(helper.make_model(graph, opset_imports=opsets, ir_version=9)), path)
    return path


def _with_a_past(path: Path) -> Path:
    """The queries attend to a past, behind which their own keys are put."""
    kinds = ("key", "value")
    nodes = [helper.make_node("Concat", [f"past_{kind}", kind], [f"all_{kind}"], axis=2) for kind in kinds]
    nodes.append(flash_node(("query", "all_key", "all_value"), diagonal=1))
    inputs = [_tensor(name, "seq") for name in ("query", *kinds)] + [_tensor(f"past_{kind}", "past") for kind in kinds]
    return _saved(path, nodes, inputs, "seq")


def _of_multiples(path: Path) -> Path:
    inputs = [_tensor("query", "16*h"), _tensor("key", "4*h + 1"), _tensor("value", "4*h + 1")]
    return _saved(path, [flash_node(causal=0)], inputs, "16*h")


def _limits(engine: Path) -> dict[str, list[tuple[int, ...]]]:
    (profile,) = json.loads(sidecar_path(engine).read_text())["profiles"]
    return {name: [tuple(shape[2:-1]) for shape in limits.values()] for name, limits in profile.items()}


def test_an_engine_of_a_past_that_may_be_empty_has_every_node_as_a_plugin(
    rtx: Backend, tmp_path: Path, flash_trt: Command
) -> None:
    engine = tmp_path / "m.engine"
    given = f"past_key:1x{HEADS}x0x{HEAD_DIM},2x{HEADS}x33x{HEAD_DIM},3x{HEADS}x129x{HEAD_DIM}"
    shapes = ("--shape", given, "--shape", given.replace("key", "value"))
    assert flash_trt("build", _with_a_past(tmp_path / "m.onnx"), "-o", engine, "--target", "sm80,sm120", *shapes) == 0
    assert _limits(engine)["past_key"] == _limits(engine)["past_value"] == [(0,), (33,), (129,)]
    sidecar = json.loads(sidecar_path(engine).read_text())
    assert [layer["name"] for layer in sidecar["plugin_layers"]] == ["attention"]
    assert sidecar["plan_proof"] == "fields"


@pytest.mark.parametrize("past", [0, 1, 37])
def test_the_same_model_runs_from_an_empty_past_on(tmp_path: Path, flash_trt: Command, past: int) -> None:
    rng, length = np.random.default_rng(past), 5
    own, before = (2, HEADS, length, HEAD_DIM), (2, HEADS, past, HEAD_DIM)
    feeds = {name: rng.standard_normal(own, np.float32) for name in ("query", "key", "value")}
    feeds |= {name: rng.standard_normal(before, np.float32) for name in ("past_key", "past_value")}
    np.savez(tmp_path / "in.npz", **feeds)
    flags = ("--inputs", tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    assert flash_trt("run", _with_a_past(tmp_path / "m.onnx"), *flags) == EXIT_OK
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    keys, values = (np.concatenate([wide[f"past_{kind}"], wide[kind]], 2) for kind in ("key", "value"))
    scores = np.where(np.tri(length, past + length, past, bool), SCALE * wide["query"] @ keys.swapaxes(2, 3), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    right = weights / weights.sum(-1, keepdims=True) @ values
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["output"], right, atol=5e-6, rtol=0)


def test_an_engine_of_multiples_of_a_length_has_them_in_its_profile(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model, engine = _of_multiples(tmp_path / "m.onnx"), tmp_path / "m.engine"
    given = ("--shape", f"query:1x{HEADS}x16x{HEAD_DIM},2x{HEADS}x48x{HEAD_DIM},3x{HEADS}x160x{HEAD_DIM}")
    assert flash_trt("build", model, "-o", engine, "--target", "sm80", *given) == EXIT_OK
    assert _limits(engine) == {
        "query": [(16,), (48,), (160,)],
        "key": [(5,), (13,), (41,)],
        "value": [(5,), (13,), (41,)],
    }
    capsys.readouterr()
    assert flash_trt("build", model, "-o", engine, "--target", "sm80", *given, "--shape", SIX_KEYS) == EXIT_USAGE
    assert "4*h + 1 = 5,13,41, since h = 1,3,10, as --shape query says" in capsys.readouterr().err
