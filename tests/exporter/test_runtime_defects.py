# SPDX-License-Identifier: Apache-2.0
"""An fp16 file on which ONNX Runtime's optimizations crash is told as such, and runs in our own sessions."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exporter.torch_models import BatchFirst

import flash_export
import flash_trt
from flash_export import runtime_defects


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, flash_export.Result, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module, x = BatchFirst().eval().half(), torch.randn(2, 7, 24).half()
    path = tmp_path_factory.mktemp("halves") / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = flash_export.export(module, {"x": x}, dynamic_shapes={"x": {0: "batch"}}, output=path)
        return path, result, x, module.double()(x.double())


def test_a_crash_of_a_process_that_loads_the_file_is_a_warning_with_the_way_round(
    exported: tuple[Path, flash_export.Result, torch.Tensor, torch.Tensor],
) -> None:
    path, result, _, _ = exported
    assert len(result.fused) == 1
    told = [w for w in result.warnings if "crash on this graph in fp16" in w]
    crash = runtime_defects.crash_of(path)
    assert bool(told) == bool(crash)  # a runtime without the defect loads it, and nothing is told
    if crash:
        assert "disabled_optimizers=['MatmulTransposeFusion'] loads it" in told[0]


def test_a_session_of_our_own_runs_it(
    exported: tuple[Path, flash_export.Result, torch.Tensor, torch.Tensor],
) -> None:
    path, _, x, right = exported
    (got,) = flash_trt.session(path).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(got.astype(np.float64), right.detach().numpy(), atol=2e-3, rtol=0)


def save_in_half(path: Path) -> None:
    """Writes a model of one node in fp16."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, [2])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, [2])],
    )
    onnx.save(onnx.helper.make_model(graph), path)


def test_a_process_that_ends_by_a_signal_is_a_crash_and_an_error_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_half(tmp_path / "m.onnx")
    assert runtime_defects.disabled_optimizers(tmp_path / "m.onnx") == [runtime_defects.AVOIDED]
    monkeypatch.setattr(runtime_defects, "_LOADS", "raise SystemExit(1)")
    assert runtime_defects.crash_of(tmp_path / "m.onnx") == ""
    monkeypatch.setattr(runtime_defects, "_LOADS", "import os, sys; len(sys.argv) > 4 or os.kill(os.getpid(), 11)")
    assert "signal 11); a session with disabled_optimizers" in runtime_defects.crash_of(tmp_path / "m.onnx")
    monkeypatch.setattr(runtime_defects, "_LOADS", "import os; os.kill(os.getpid(), 6)")
    assert runtime_defects.crash_of(tmp_path / "m.onnx").endswith("(signal 6)")


def test_the_level_that_loads_a_file_is_the_first_with_which_no_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    save_in_half(path)
    assert runtime_defects.level_that_loads(path, "") == ("ORT_ENABLE_ALL", "")
    crashes = "import os, sys; sys.argv[2:4] in [{}] and os.kill(os.getpid(), 11)"
    monkeypatch.setattr(
        runtime_defects, "_LOADS", crashes.format("['ORT_ENABLE_ALL', 'l'], ['ORT_ENABLE_EXTENDED', 'l']")
    )
    level, why = runtime_defects.level_that_loads(path, "l")
    assert level == "ORT_ENABLE_BASIC"
    assert "signal 11" in why
    monkeypatch.setattr(runtime_defects, "_TRIED_BYTES", 1)
    level, why = runtime_defects.level_that_loads(path, "l")
    assert level == "ORT_ENABLE_EXTENDED", "not tried"
    assert "too large" in why
