# SPDX-License-Identifier: Apache-2.0
"""Opens what a comparison runs as Polygraphy runners: an ONNX file on the CPU, an engine on the GPU."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir

from flash_export import runtime, twin
from flash_export.errors import MissingHere, UnsupportedModel
from flash_export.input_roles import fed_inputs
from flash_export.requirements import pip_install
from flash_trt import cpu_operator, engine_load, engine_profiles
from flash_trt.backends import BackendName
from flash_trt.ort_errors import one_line

_INLINE_BYTES = 2**20


def polygraphy_logger(*, quiet: bool = True) -> Any:
    """Polygraphy's logger, silenced below errors when ``quiet``.

    Raises:
        MissingHere: Polygraphy is not installed.
    """
    try:
        from polygraphy.logger import G_LOGGER
    except ImportError as error:
        raise MissingHere(
            "Polygraphy is not installed",
            where="import polygraphy",
            got=str(error),
            need="the Python package polygraphy",
            do=pip_install("rtx", "polygraphy"),
        ) from error
    if quiet:
        G_LOGGER.module_severity = G_LOGGER.ERROR
    return G_LOGGER


def open_onnx(path: Path, name: str, *, instead: bytes | None = None) -> Any:
    """An active ``OnnxrtRunner`` of ``path`` on the CPU. The caller deactivates it.

    Only basic optimisations are on: the extended ones replace whole attentions by operators of ONNX Runtime. Where
    ONNX Runtime does not load a reference that onnx's reference evaluator does (several with the standard Attention
    operator at opset 23), the evaluator runs it. A fused model is for runtimes, so one that they refuse is refused.

    Args:
        path: the file.
        name: "fused" or "reference".
        instead: a model to load in the file's place, with weights beside the file.

    Raises:
        UnsupportedModel: ONNX Runtime does not load it, nor the evaluator where it may.
    """
    polygraphy_logger()
    import onnxruntime
    from polygraphy.backend.onnxrt import OnnxrtRunner

    onnxruntime.set_default_logger_severity(4)
    settings = cpu_operator.onnx_settings()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.intra_op_num_threads = len(os.sched_getaffinity(0))  # unpinned: the processors may be a part of all

    if instead is not None:
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))

    def load() -> onnxruntime.InferenceSession:
        model = str(path) if instead is None else instead
        return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])

    runner = OnnxrtRunner(load, name=name)
    try:
        runner.activate()
    except Exception as error:
        with contextlib.suppress(runtime.CannotRun):
            if name != "reference":
                raise runtime.CannotRun from error
            return EvaluatorRunner(ir.load(path, format="protobuf"))
        raise UnsupportedModel(
            f"ONNX Runtime cannot load the {name} model",
            where=str(path),
            got=one_line(error),
            need="a model that runs in plain ONNX Runtime: a fused one carries its function bodies",
            do="export without --no-fallback; for another operator, compare on a machine with its library",
        ) from error
    return runner


class EvaluatorRunner:
    """onnx's reference evaluator with the part of a Polygraphy runner's face that a comparison uses."""

    def __init__(self, model: ir.Model) -> None:
        """Loads ``model``; CannotRun when onnx refuses it."""
        self._session = runtime.EvaluatorSession(model)
        self._inputs = {v.name or "": v for v in fed_inputs(model).values()}
        self._outputs = [v.name or "" for v in model.graph.outputs]

    def get_input_metadata(self, **_: object) -> dict[str, Any]:
        """name -> an object with ``dtype``, as Polygraphy's."""
        return {name: SimpleNamespace(dtype=value.dtype) for name, value in self._inputs.items() if value.dtype}

    def infer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """name -> output."""
        return dict(zip(self._outputs, self._session.run(feeds), strict=True))

    def deactivate(self) -> None:
        """Nothing is held."""


def float32_twin(path: Path, folder: Path) -> Path | None:
    """The model with float32 in place of float16 and bfloat16, written into ``folder``; None when it has neither."""
    model = ir.load(path, format="protobuf")
    if twin.roundoff(model) == 1.0:
        return None
    twin.to_float32(model)
    written = folder / f"{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.onnx"
    ir.save(model, written, external_data=f"{written.name}.data", size_threshold_bytes=_INLINE_BYTES)
    return written


def open_engine(path: Path, *, trusted: bool) -> Any:
    """An active ``TrtRunner`` of an engine, with our plugin loaded. The caller deactivates it.

    Raises:
        UnsafeInput: the engine is not the one its sidecar describes, and ``trusted`` is False: an engine is code.
        MissingHere: no GPU, no TensorRT or no plugin here.
    """
    engine, backend = engine_load.admit(path, trusted=trusted)
    tell_polygraphy(engine.backend)
    polygraphy_logger()
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    runtime = engine_load.open_runtime(engine, backend) if engine.carries_plugin else None
    runner = TrtRunner(EngineFromBytes(BytesFromPath(str(path)), runtime=runtime), name="fused")
    try:
        runner.activate()
    except Exception as error:
        raise engine_load.does_not_load(engine, backend, one_line(error)) from error
    return ProfiledRunner(runner)


class ProfiledRunner:
    """An active ``TrtRunner`` that runs each set of inputs in the first profile that holds it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._profile = 0

    def get_input_metadata(self, **flags: bool) -> Any:
        """As Polygraphy's."""
        return self._runner.get_input_metadata(**flags)

    def infer(self, feeds: dict[str, np.ndarray]) -> Any:
        """name -> output."""
        number = engine_profiles.first_holding(self._runner.engine, feeds)
        if number != self._profile:
            self._runner.set_profile(number)
            self._profile = number
        return self._runner.infer(feeds)

    def deactivate(self) -> None:
        """As Polygraphy's."""
        self._runner.deactivate()


def tell_polygraphy(name: BackendName) -> None:
    """Polygraphy picks its TensorRT when it is imported, by this variable."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if name == "tensorrt-rtx" else "0"
    from polygraphy import config

    config.USE_TENSORRT_RTX = name == "tensorrt-rtx"


def input_dtypes(runner: Any) -> dict[str, np.dtype]:
    """name -> dtype of each input of ``runner``."""
    metadata = runner.get_input_metadata(use_numpy_dtypes=False)
    return {name: np.dtype(meta.dtype.numpy()) for name, meta in metadata.items()}


def adapted(feeds: Mapping[str, np.ndarray], runner: Any) -> dict[str, np.ndarray]:
    """``feeds`` in the dtypes that ``runner`` takes; halves become float32 for a twin."""
    typed = {}
    for name, dtype in input_dtypes(runner).items():
        array = feeds[name]
        same_kind = twin.is_float(array.dtype) and twin.is_float(dtype) and array.dtype != dtype
        typed[name] = twin.convert_array(array, dtype) if same_kind else array
    return typed
