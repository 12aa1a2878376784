# SPDX-License-Identifier: Apache-2.0
"""What a sample does with an engine on a GPU, done without one: the engine's ONNX file stands in for it.

Everything but ``flash_trt.open_engine`` is the sample's own code. The same on a GPU are the tests marked gpu.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest

import flash_trt
from flash_trt import engine_file, engine_load, gpu

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
SAYS = "a stand-in on the CPU"


class EngineStandIn:
    """``flash_trt.EngineSession`` of an ONNX file; ``spoils`` adds to every output."""

    spoils = 0.0
    open = 0

    def __init__(self, onnx_file: Path) -> None:
        fused = "flash_export" in {o.domain for o in _opsets(onnx_file)}
        self._session = flash_trt.session(onnx_file) if fused else onnxruntime.InferenceSession(onnx_file)
        EngineStandIn.open += 1

    @property
    def input_dtypes(self) -> dict[str, np.dtype]:
        """Name -> dtype of each input."""
        return {value.name: np.dtype(_TYPES[value.type]) for value in self._session.get_inputs()}

    def implementation(self) -> str:
        """Not what the real one says."""
        return SAYS

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name; every feed must be an input of exactly its type, as those of an engine."""
        dtypes = self.input_dtypes
        assert {name: feeds[name].dtype for name in dtypes} == dtypes
        names = [value.name for value in self._session.get_outputs()]
        made = self._session.run(names, {name: feeds[name] for name in dtypes})
        return {name: array + array.dtype.type(self.spoils) for name, array in zip(names, made, strict=True)}

    def close(self) -> None:
        """Once for each that is made."""
        EngineStandIn.open -= 1


def _opsets(path: Path) -> list:
    import onnx

    return list(onnx.load(path, load_external_data=False).opset_import)


def put_in(monkeypatch: pytest.MonkeyPatch, onnx_of: dict[str, Path], spoils: float = 0.0) -> None:
    """Lets samples meet a GPU for which every engine is built, and the ONNX files in ``onnx_of`` by engine.

    No TensorRT is asked for: the engine does not run in one.
    """
    monkeypatch.setattr(EngineStandIn, "spoils", spoils)
    monkeypatch.setattr(EngineStandIn, "open", 0)
    monkeypatch.setattr(flash_trt, "open_engine", lambda path: EngineStandIn(onnx_of[Path(path).name]))
    monkeypatch.setattr(engine_file.EngineFile, "targets", ["sm80"])
    monkeypatch.setattr(gpu, "devices", lambda: [gpu.Device("a GPU", "sm80", 2**34)])
    monkeypatch.setattr(engine_load, "admit", _admit)


def _admit(path: Path, *, trusted: bool) -> tuple[engine_file.EngineFile, None]:
    engine_file.require_gpu(engine := engine_file.read(path))
    return engine, None


def as_module(script: Path) -> ModuleType:
    """A sample's script, imported."""
    name = f"{script.stem}_sample"
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with warnings.catch_warnings(action="ignore"):  # Ray's own
        spec.loader.exec_module(module)
    return module
