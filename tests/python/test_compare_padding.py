# SPDX-License-Identifier: Apache-2.0
"""Padding that a comparison draws itself fails no right model, and hides no fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from flash_export.errors import EXIT_NUMBERS_DIFFER, EXIT_OK

Command = Callable[..., int]
SIZE = 5


def _attention(path: Path, last: str = "", *, is_causal: bool = True, hides: bool = False, own: str = "probs") -> Path:
    """softmax(x . x^T + mask) . x on [batch, seq, 5], a causal mask and one of 1 and 0 by minus infinity.

    Args:
        path: where it is written.
        last: "zero" makes rows without a key 0, as FlashAttention does; "" leaves their NaN.
        is_causal: off is a fault.
        hides: 1 in the mask hides a key instead of showing it.
        own: what the values are weighted with; "made" is NaN everywhere.
    """
    constants = {
        "hidden": np.array(-np.inf, np.float32),
        "nought": np.array(0, np.float32),
        "zero": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "rows": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("Transpose", ["x"], ["x_t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "x_t"], ["products"]),
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Squeeze", ["length"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["keys"]),
        helper.make_node("Unsqueeze", ["keys", "rows"], ["queries"]),
        helper.make_node("LessOrEqual", ["keys", "queries"], ["past"]),
        helper.make_node("Where", ["past", "products", "hidden"], ["causal"]),
        helper.make_node("Equal", ["mask", "zero" if not hides else "one"], ["padded"]),
        helper.make_node("Unsqueeze", ["padded", "rows"], ["padded_rows"]),
        helper.make_node("Where", ["padded_rows", "hidden", "causal" if is_causal else "products"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["raw"], axis=-1),
        helper.make_node("IsNaN", ["raw"], ["none"]),
        helper.make_node("Where", ["none", "nought", "raw"], ["zeroed"]),
        helper.make_node("Identity", ["zeroed" if last == "zero" else "raw"], ["probs"]),
        helper.make_node("Div", ["nought", "nought"], ["nan"]),
        helper.make_node("Add", ["probs", "nan"], ["made"]),
        helper.make_node("MatMul", [own, "x"], ["output"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", SIZE]),
        helper.make_tensor_value_info("mask", TensorProto.INT64, ["batch", "seq"]),
    ]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", "seq", SIZE])]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize("hides", [False, True])
def test_a_right_model_passes_where_drawn_padding_leaves_rows_without_a_key(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], hides: bool
) -> None:
    pair = _attention(tmp_path / "f.onnx", "zero", hides=hides), _attention(tmp_path / "u.onnx", hides=hides)
    assert flash_trt("compare", *pair, "--json", tmp_path / "v.json", "--repeats", 4) == EXIT_OK
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the first key is kept there instead") == 1
    outputs = json.loads((tmp_path / "v.json").read_text())["outputs"]
    assert len(outputs) == 12
    assert all(output["compared"] for output in outputs)


def test_a_fault_shows_behind_padding_that_was_drawn_again(tmp_path: Path, flash_trt: Command) -> None:
    reference = _attention(tmp_path / "u.onnx")
    wrong = _attention(tmp_path / "f.onnx", "zero", is_causal=False)
    assert flash_trt("compare", wrong, reference, "--json", tmp_path / "v.json") == EXIT_NUMBERS_DIFFER
    kinds = {output["kind"] for output in json.loads((tmp_path / "v.json").read_text())["outputs"]}
    assert kinds == {"differs", "passed"}  # a sequence of one sees the same key either way


@pytest.mark.parametrize("own", ["made", "probs"])
def test_nan_of_fused_alone_fails_and_so_does_nan_with_every_padding(
    tmp_path: Path, flash_trt: Command, own: str
) -> None:
    fused = _attention(tmp_path / "f.onnx", "zero", own=own)
    reference = _attention(tmp_path / "u.onnx", own="probs" if own == "made" else "made")
    assert flash_trt("compare", fused, reference, "--json", tmp_path / "v.json") == EXIT_NUMBERS_DIFFER
    kinds = {output["kind"] for output in json.loads((tmp_path / "v.json").read_text())["outputs"]}
    assert kinds == {"nan_in_fused" if own == "made" else "nan_in_reference"}


def test_padding_of_the_users_own_is_judged_as_given(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, SIZE)).astype(np.float32)
    np.savez(tmp_path / "left.npz", x=x, mask=np.array([[0, 1, 1], [1, 1, 1]], np.int64))
    pair = _attention(tmp_path / "f.onnx", "zero"), _attention(tmp_path / "u.onnx")
    assert flash_trt("compare", *pair, "--values", tmp_path / "left.npz") == EXIT_NUMBERS_DIFFER
    said = " ".join(capsys.readouterr().err.split())
    assert "do give inputs that leave each row a key" in said
    assert "check the export" not in said
