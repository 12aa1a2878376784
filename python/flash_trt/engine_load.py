# SPDX-License-Identifier: Apache-2.0
"""Loads an engine into its TensorRT, when it may and can run here: its trust, the GPU, the plugin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flash_export.errors import MissingHere
from flash_trt import backends, engine_file, plugin_library
from flash_trt.backends import Backend
from flash_trt.engine_file import EngineFile


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, ready for contexts. ``runtime`` is kept since TensorRT wants it to outlive the engine."""

    file: EngineFile
    backend: Backend
    runtime: Any
    engine: Any


def admit(path: Path, *, trusted: bool) -> tuple[EngineFile, Backend]:
    """The engine's facts and its TensorRT, with our plugin in its registry where the engine does not carry it.

    Raises:
        UnsafeInput: the engine is not the one its sidecar describes, and ``trusted`` is False: an engine is code.
        MissingHere: no GPU that it was built for, no TensorRT or no plugin here.
    """
    engine = engine_file.read(path)
    if not trusted:
        engine_file.require_trust(engine)
    engine_file.require_gpu(engine)
    backend = backends.load(engine.backend)
    if not engine.carries_plugin:
        engine_file.require_plugin(engine, plugin_library.load(backend))
    return engine, backend


def load(path: Path, *, trusted: bool) -> LoadedEngine:
    """``path``, deserialised.

    Raises:
        UnsafeInput, MissingHere: as ``admit``; MissingHere too when TensorRT does not take the engine.
    """
    engine, backend = admit(path, trusted=trusted)
    mark = len(backend.log)
    runtime = open_runtime(engine, backend)
    loaded = runtime.deserialize_cuda_engine(path.read_bytes())
    if loaded is None:
        errors = [text.strip() for severity, text in backend.log[mark:] if severity <= 1]
        raise does_not_load(engine, backend, "; ".join(errors) or "TensorRT gives no reason")
    return LoadedEngine(engine, backend, runtime, loaded)


def open_runtime(engine: EngineFile, backend: Backend) -> Any:
    """A TensorRT runtime that may run the library inside an engine that carries ours."""
    runtime = backend.trt.Runtime(backend.logger)
    if engine.carries_plugin:
        runtime.engine_host_code_allowed = True  # the user, or the sidecar's hash, vouches for it
    return runtime


def does_not_load(engine: EngineFile, backend: Backend, got: str) -> MissingHere:
    """What to say when TensorRT refuses an engine that was admitted."""
    return MissingHere(
        "the engine does not load on this machine",
        where=str(engine.path),
        got=got,
        need=f"{backend.name} as it was built with: {engine.sidecar.get('backend') or 'not told'}",
        do="build the engine again on this machine",
    )
