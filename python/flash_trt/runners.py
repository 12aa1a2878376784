# SPDX-License-Identifier: Apache-2.0
"""Opens what a comparison runs as Polygraphy runners: an ONNX file on the CPU, an engine on the GPU."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from flash_export import twin
from flash_export.errors import MissingHere, UnsafeInput, UnsupportedModel
from flash_trt import backends, gpu, plugin_library
from flash_trt.backends import BackendName
from flash_trt.build import sidecar_path

_ENGINE_MAGIC = (b"ftrt", b"ptrt", b"vtrt")
"""First bytes of TensorRT's and TensorRT for RTX's plans."""
_INLINE_BYTES = 2**20


def is_engine(path: Path) -> bool:
    """Whether ``path`` holds a TensorRT plan, told by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(4) in _ENGINE_MAGIC
    except OSError:
        return False  # reading it as ONNX says what is wrong


def polygraphy_logger() -> Any:
    """Polygraphy's logger, silenced below errors.

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
            do="pip install 'flash-export[rtx]'",
        ) from error
    G_LOGGER.module_severity = G_LOGGER.ERROR
    return G_LOGGER


def open_onnx(path: Path, name: str) -> Any:
    """An active ``OnnxrtRunner`` of ``path`` on the CPU. The caller deactivates it.

    Only basic optimisations are on: the extended ones replace whole attentions by operators of ONNX Runtime.

    Raises:
        UnsupportedModel: ONNX Runtime does not load it.
    """
    polygraphy_logger()
    import onnxruntime
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx

    onnxruntime.set_default_logger_severity(4)
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    runner = OnnxrtRunner(SessionFromOnnx(str(path), graph_optimization_level=level), name=name)
    try:
        runner.activate()
    except Exception as error:
        raise UnsupportedModel(
            f"ONNX Runtime cannot load the {name} model",
            where=str(path),
            got=one_line(error),
            need="a model that runs in plain ONNX Runtime: a fused one carries its function bodies",
            do="export without --no-fallback; for another operator, compare on a machine with its library",
        ) from error
    return runner


def float32_twin(path: Path, folder: Path) -> Path | None:
    """The model with float32 in place of float16 and bfloat16, written into ``folder``; None when it has neither."""
    model = ir.load(path)
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
    sidecar = _sidecar_of(path)
    if not trusted:
        _require_trust(path, sidecar)
    if not gpu.devices():
        raise MissingHere(
            "an engine runs only where a GPU is",
            where=str(path),
            got="no NVIDIA GPU, or no driver for it",
            need="a GPU of a generation that the engine was built for",
            do="compare the .onnx that it was built from here, and the engine on the GPU machine",
        )
    name: BackendName = (sidecar or {}).get("backend", {}).get("name", "tensorrt")
    _tell_polygraphy(name)
    backend = backends.load(name)
    plugin_library.load(backend)
    polygraphy_logger()
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    runner = TrtRunner(EngineFromBytes(BytesFromPath(str(path))), name="fused")
    try:
        runner.activate()
    except Exception as error:
        raise MissingHere(
            "the engine does not load on this machine",
            where=str(path),
            got=one_line(error),
            need=f"{name} and a GPU it was built for: {', '.join((sidecar or {}).get('targets', [])) or 'not told'}",
            do="build the engine again on this machine",
        ) from error
    return runner


def _tell_polygraphy(name: BackendName) -> None:
    """Polygraphy picks its TensorRT when it is imported, by this variable."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if name == "tensorrt-rtx" else "0"
    from polygraphy import config

    config.USE_TENSORRT_RTX = name == "tensorrt-rtx"


def _sidecar_of(path: Path) -> dict[str, Any] | None:
    try:
        sidecar = json.loads(sidecar_path(path).read_text())
    except (OSError, ValueError):
        return None
    return sidecar if isinstance(sidecar, dict) else None


def _require_trust(path: Path, sidecar: dict[str, Any] | None) -> None:
    expected = (sidecar or {}).get("engine", {}).get("sha256")
    found = plugin_library.sha256_of(path)
    if found != expected:
        raise UnsafeInput(
            "the engine is not known to be ours, and loading an engine runs code that it carries",
            where=str(path),
            got=f"SHA-256 {found}, its sidecar says {expected or 'nothing'}",
            need=f"the hash in {sidecar_path(path).name}, as flash-trt build writes it",
            do="build it again with flash-trt build, or pass --trust-engine if you made it yourself",
        )


def adapted(feeds: dict[str, np.ndarray], runner: Any) -> dict[str, np.ndarray]:
    """``feeds`` in the dtypes that ``runner`` takes; halves become float32 for a twin."""
    wanted = runner.get_input_metadata(use_numpy_dtypes=True)
    typed = {}
    for name, meta in wanted.items():
        array, dtype = feeds[name], np.dtype(meta.dtype)
        same_kind = twin.is_float(array.dtype) and twin.is_float(dtype) and array.dtype != dtype
        typed[name] = twin.convert_array(array, dtype) if same_kind else array
    return typed


def one_line(error: Exception) -> str:
    """The error's text on one line, cut where it stops being readable."""
    return " ".join(str(error).split())[:500]
