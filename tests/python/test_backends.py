# SPDX-License-Identifier: Apache-2.0
"""One module bridges the TensorRTs: what a version lacks is left out, what a machine lacks is named."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from python.attention_models import fused

from flash_export.errors import EXIT_MISSING, MissingHere, UsageError
from flash_trt import backends
from flash_trt.backends import Backend

Command = Callable[..., int]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is loaded yet."""
    monkeypatch.setattr(backends, "_loaded", {})


@pytest.fixture
def without_rtx(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not find TensorRT for RTX."""
    for module in ("tensorrt_rtx", "tensorrt_rtx_libs"):
        monkeypatch.setitem(sys.modules, module, None)


def test_without_rtx_a_build_ends_with_5_and_names_the_extra(
    without_rtx: None, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "--backend", "tensorrt-rtx") == EXIT_MISSING
    assert 'pip install "tensorrt-rtx-cu13==' in capsys.readouterr().err


def test_with_nothing_installed_auto_names_the_extra_that_needs_no_gpu(without_rtx: None) -> None:
    if backends.is_installed("tensorrt"):
        pytest.skip("TensorRT is installed here, so auto takes it")
    with pytest.raises(MissingHere, match="rtx"):
        backends.select("auto")


def test_missing_tensorrt_names_its_own_extra(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingHere, match=r"pip install .tensorrt>=10"):
        backends.select("tensorrt")


def test_libraries_that_do_not_load_are_told_from_a_missing_package(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise OSError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(backends.importlib, "import_module", broken)
    with pytest.raises(MissingHere, match="is installed but its libraries do not load"):
        backends.load("tensorrt")


@pytest.mark.parametrize(
    ("gpus", "installed", "targets", "chosen"),
    [
        (["a GPU"], {"tensorrt", "tensorrt-rtx"}, False, "tensorrt"),
        (["a GPU"], {"tensorrt", "tensorrt-rtx"}, True, "tensorrt-rtx"),
        ([], {"tensorrt", "tensorrt-rtx"}, False, "tensorrt-rtx"),
        (["a GPU"], {"tensorrt-rtx"}, False, "tensorrt-rtx"),
        ([], {"tensorrt"}, False, "tensorrt"),
        ([], set(), False, "tensorrt-rtx"),
    ],
)
def test_auto_takes_tensorrt_only_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], installed: set[str], targets: bool, chosen: str
) -> None:
    monkeypatch.setattr(backends.gpu, "devices", lambda: gpus)
    monkeypatch.setattr(backends, "is_installed", lambda name: name in installed)
    monkeypatch.setattr(backends, "load", lambda name: name)
    assert backends.select("auto", targets=targets) == chosen


def test_rtx_tells_the_generations_it_builds_for(rtx: Backend) -> None:
    assert {"sm80", "sm86", "sm89", "sm120"} <= set(rtx.targets)
    assert "sm90" not in rtx.targets


def test_a_backend_without_targets_refuses_them_all() -> None:
    backend = Backend("tensorrt", SimpleNamespace(__version__="11.4"), [], None)
    assert backend.targets == []
    with pytest.raises(UsageError, match="no --target"):
        backends.check_targets(backend, ["sm80"], backend.targets)


@pytest.mark.parametrize("target", ["89", "8.9", "sm_89", "SM8.9", "sm89a"])
def test_a_generation_that_is_spelled_otherwise_is_told_in_ours(target: str) -> None:
    backend = Backend("tensorrt-rtx", SimpleNamespace(__version__="1.7"), [], None)
    with pytest.raises(UsageError) as caught:
        backends.check_targets(backend, ["sm80", target], ("sm80", "sm89"))
    assert caught.value.do == "write sm89"
    with pytest.raises(UsageError) as caught:
        backends.check_targets(backend, ["sm90"], ("sm80", "sm89"))
    assert caught.value.do.startswith("for another GPU build on a machine")


# --- flags that some versions lack ------------------------------------------------------------------------------------


def _network_flags(*known: str) -> int:
    """The flags that create_network passes to a TensorRT that knows ``known``, as bits in that order."""
    flags = enum.IntEnum("NetworkDefinitionCreationFlag", {name: bit for bit, name in enumerate(known)})
    backend = Backend("tensorrt", SimpleNamespace(NetworkDefinitionCreationFlag=flags), [], None)
    passed: list[int] = []
    backends.create_network(backend, SimpleNamespace(create_network=passed.append))
    return passed[0]


def test_networks_are_strongly_typed_wherever_that_can_be_asked() -> None:
    assert _network_flags("STRONGLY_TYPED") == 0b1
    assert _network_flags("EXPLICIT_BATCH", "STRONGLY_TYPED") == 0b10
    assert _network_flags("PREFER_AOT") == 0


def test_a_builder_that_finds_no_gpu_says_so() -> None:
    class Builder:
        def __init__(self, logger: object) -> None:
            backend.log.append((1, "CUDA initialization failure with error: 35"))
            backend.log.append((1, "no CUDA-capable device is detected"))
            raise TypeError("pybind11::init(): factory function returned nullptr")

    trt = SimpleNamespace(__version__="11.4", Builder=Builder)
    backend = Backend("tensorrt", trt, [], None)
    with pytest.raises(MissingHere) as caught:
        backends.create_builder(backend)
    assert caught.value.got == "no CUDA-capable device is detected"


def test_progress_is_left_out_where_tensorrt_has_none() -> None:
    old = Backend("tensorrt", SimpleNamespace(), [], None)
    assert backends.set_progress(old, SimpleNamespace(), lambda *_: None) is None


def test_progress_is_reported_while_rtx_builds(rtx: Backend, tmp_path: Path) -> None:
    from flash_trt import onnx_file, shapes
    from flash_trt.build import build_engine

    seen: list[tuple[str, int, int]] = []
    file = onnx_file.read(fused(tmp_path / "m.onnx"))

    def watch(*step: Any) -> None:
        seen.append(step)

    build_engine(rtx, file, shapes.plan_profiles(file.inputs, []), ("sm80",), watch)
    assert any(done == total > 0 for _, done, total in seen)


def test_a_timing_cache_goes_into_the_build_and_comes_out_of_it() -> None:
    class Config:
        cache: bytes | None = None

        def create_timing_cache(self, measured: bytes) -> bytes:
            return measured

        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
            assert not ignore_mismatch
            self.cache = cache
            return True

        def get_timing_cache(self) -> SimpleNamespace | None:
            return None if self.cache is None else SimpleNamespace(serialize=lambda: self.cache + b" and new")

    config = Config()
    assert backends.timing_cache(config) is None
    backends.set_timing_cache(config, b"old")
    assert backends.timing_cache(config) == b"old and new"


# --- the log ----------------------------------------------------------------------------------------------------------


def test_scratch_memory_is_the_largest_told_since_the_mark() -> None:
    log = [
        (3, "Max Scratch Memory: 9000 bytes"),
        (3, "Max Scratch Memory: 12 bytes"),
        (3, "Max Scratch Memory: 40 bytes"),
    ]
    backend = Backend("tensorrt", None, log, None)
    assert backend.scratch_bytes_since(1) == 40
    assert backend.scratch_bytes_since(3) is None


def test_what_only_says_that_no_driver_is_here_is_no_error() -> None:
    log = [
        (1, "In foo: real trouble\n(cudaError 35: CUDA driver version is insufficient for CUDA runtime version)"),
        (2, "a warning"),
    ]
    assert Backend("tensorrt", None, log, None).errors_since(0) == ["In foo: real trouble"]
