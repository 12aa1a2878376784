# SPDX-License-Identifier: Apache-2.0
"""flash_trt.session and cpu_operator_path: the fused file on a CPU, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from python import attention_models

import flash_trt
from flash_export.errors import MissingHere, UnsupportedModel, UsageError


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    return attention_models.fused(tmp_path / "model.onnx")


def edited(path: Path, edit: Callable[[onnx.ModelProto], None]) -> Path:
    proto = onnx.load(path)
    edit(proto)
    onnx.save(proto, path)
    return path


def test_a_session_runs_the_operator_and_agrees_with_the_functions(fused: Path) -> None:
    rng = np.random.default_rng(7)
    shape = (2, attention_models.HEADS, 37, attention_models.HEAD_DIM)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name in ("query", "key", "value")}
    ours = flash_trt.session(fused, intra_op_num_threads=1)
    plain = onnxruntime.InferenceSession(fused, providers=["CPUExecutionProvider"])
    assert ours.get_session_options().intra_op_num_threads == 1
    np.testing.assert_allclose(ours.run(None, feeds)[0], plain.run(None, feeds)[0], atol=1e-5)
    assert edited(fused, lambda proto: proto.ClearField("functions"))
    flash_trt.session(fused).run(None, feeds)  # nothing but the operator can run the nodes now


def test_an_option_that_onnx_runtime_lacks_is_named(fused: Path) -> None:
    with pytest.raises(UsageError, match="no such option") as error:
        flash_trt.session(fused, intra_op_threads=1)
    assert "intra_op_threads=1" in str(error.value)


def test_an_unknown_attribute_is_named(fused: Path) -> None:
    extra = onnx.helper.make_attribute("alibi", 1)
    with pytest.raises(UsageError, match="alibi"):
        flash_trt.session(edited(fused, lambda proto: proto.graph.node[0].attribute.append(extra)))


def test_a_newer_operator_version_is_refused_with_both(fused: Path) -> None:
    def newer(proto: onnx.ModelProto) -> None:
        next(opset for opset in proto.opset_import if opset.domain == "flash_export").version = 2

    with pytest.raises(UnsupportedModel, match="newer") as error:
        flash_trt.session(edited(fused, newer))
    assert "version 2" in error.value.got
    assert "version 1" in error.value.need


def test_no_such_model_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        flash_trt.session(tmp_path / "nothing.onnx")


def test_a_missing_library_lists_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_trt.native.find", lambda library: None)
    with pytest.raises(MissingHere, match="missing") as error:
        flash_trt.cpu_operator_path()
    assert "flash_trt/lib" in error.value.where


def test_the_environment_names_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fused: Path) -> None:
    library = tmp_path / "other.so"
    monkeypatch.setenv("FLASH_TRT_CPU_OPERATOR", str(library))
    with pytest.raises(MissingHere, match="missing"):
        flash_trt.cpu_operator_path()
    library.write_text("no library")
    assert flash_trt.cpu_operator_path() == str(library)
    with pytest.raises(MissingHere, match="does not load"):
        flash_trt.session(fused)
