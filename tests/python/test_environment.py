# SPDX-License-Identifier: Apache-2.0
"""``flash-trt env`` says what a bug report needs, on any machine."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest

from flash_export.errors import EXIT_OK
from flash_trt import environment, gpu
from flash_trt.backends import Backend

Command = Callable[..., int]


def test_json_holds_versions_plugin_and_gpus(
    rtx: Backend, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("env", "--json") == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert told["python"] == platform.python_version()
    assert told["packages"]["onnxruntime"] == onnxruntime.__version__
    assert told["packages"]["tensorrt-rtx-cu13"] == rtx.version
    assert told["plugin"]["sha256"] == hashlib.sha256(Path(told["plugin"]["file"]).read_bytes()).hexdigest()
    assert "FlashAttentionPacked version 1" in told["plugin"]["tensorrt-rtx"]
    assert isinstance(told["gpus"], list)


def test_the_plain_form_has_a_line_for_everything(flash_trt: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash_trt("env") == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert {"python", "packages.torch", "plugin.file", "nvcc", "gpus"} <= {
        line.split()[0].split("[")[0] for line in lines
    }


def test_a_missing_plugin_is_told_and_is_no_failure(
    flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_TRT_PLUGIN", "/no/such/file.so")
    assert flash_trt("env", "--json") == EXIT_OK
    plugin = json.loads(capsys.readouterr().out)["plugin"]
    assert plugin["file"] is None
    assert "/no/such/file.so" in plugin["problem"]


def test_gpus_are_listed_with_generation_and_memory(
    monkeypatch: pytest.MonkeyPatch, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "devices", lambda: [gpu.Device("NVIDIA H200", "sm90", 150_000_000_000)])
    monkeypatch.setattr(gpu, "driver_version", lambda: "13.0")
    assert flash_trt("env") == EXIT_OK
    told = capsys.readouterr().out
    assert "gpus[0]" in told
    assert "name NVIDIA H200, sm sm90, memory_bytes 150000000000" in told


@pytest.mark.gpu
def test_the_driver_names_its_gpus() -> None:
    assert all(device.sm.startswith("sm") and device.memory_bytes for device in gpu.devices())


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    gpu._driver.cache_clear()
    monkeypatch.setattr(gpu.ctypes, "CDLL", missing)
    try:
        assert gpu.devices() == []
        assert gpu.driver_version() is None
    finally:
        gpu._driver.cache_clear()


def test_a_compiler_that_does_not_run_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("not a program")
    broken.chmod(0o755)
    monkeypatch.setattr(environment.shutil, "which", lambda name: str(broken))
    found = environment._nvcc()
    assert found is None or str(broken) not in found
