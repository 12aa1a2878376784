# SPDX-License-Identifier: Apache-2.0
"""One door to TensorRT 10, TensorRT 11 and TensorRT for RTX.

The three have the same Python surface with a few flags apart; what differs is asked for with ``hasattr``, here and
nowhere else. Networks are always strongly typed: precision is the model's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Literal

from flash_export.errors import MissingHere, UsageError
from flash_export.requirements import pip_install
from flash_trt import gpu, rtx_soname

BackendName = Literal["tensorrt", "tensorrt-rtx"]
BackendChoice = Literal["auto", "tensorrt", "tensorrt-rtx"]

_MODULES: dict[BackendName, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_EXTRAS: dict[BackendName, str] = {"tensorrt": "trt", "tensorrt-rtx": "rtx"}

_ERROR, _INFO = 1, 3

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(slots=True)
class Backend:
    """An imported TensorRT with its log.

    Args:
        name: which of the two products it is.
        trt: its Python module.
        log: every message since the import but verbose ones, newest last, as (severity, text); severity as TensorRT
            counts it: 0 internal error, 1 error, 2 warning, 3 info.
        logger: the ``ILogger`` that fills ``log``; TensorRT keeps a bare pointer to it, so it lives as long as we do.
    """

    name: BackendName
    trt: Any
    log: list[tuple[int, str]]
    logger: Any

    @property
    def version(self) -> str:
        """The library's version, e.g. ``1.7.1.116``."""
        return str(self.trt.__version__)

    @property
    def targets(self) -> list[str]:
        """GPU generations an engine can be built for without having them, e.g. ``["sm75", "sm80"]``; [] on TensorRT."""
        kinds = getattr(self.trt, "ComputeCapability", None)
        return [name.lower() for name in kinds.__members__ if name.startswith("SM")] if kinds else []

    def errors_since(self, mark: int) -> list[str]:
        """Error texts logged after ``mark`` (an earlier ``len(log)``); not those that only say that no GPU is here."""
        return without_driver_noise(text for severity, text in self.log[mark:] if severity <= _ERROR)

    def scratch_bytes_since(self, mark: int) -> int | None:
        """The largest "Max Scratch Memory" logged after ``mark``, in bytes; None when the log has none."""
        sizes = [int(m[1]) for _, text in self.log[mark:] if (m := re.search(r"Max Scratch Memory: (\d+) bytes", text))]
        return max(sizes, default=None)


def without_driver_noise(texts: Iterable[str]) -> list[str]:
    """The lines of ``texts`` that say something: without a driver, a cudaError 35 follows every other error."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not re.search(r"cudaError 35\b|CUDA initialization failure", line)]


_loaded: dict[BackendName, Backend] = {}


def select(choice: BackendChoice, *, targets: bool = False) -> Backend:
    """The backend that ``choice`` names, imported.

    ``auto`` takes TensorRT where it is installed beside a GPU, else TensorRT for RTX, which alone builds without a GPU
    and for several generations (``targets``).

    Raises:
        MissingHere: it is not installed or does not load here.
    """
    if choice != "auto":
        return load(choice)
    if not targets and gpu.devices() and is_installed("tensorrt"):
        return load("tensorrt")
    if not is_installed("tensorrt-rtx") and is_installed("tensorrt"):
        return load("tensorrt")
    return load("tensorrt-rtx")


def load(name: BackendName) -> Backend:
    """Imports ``name``, once a process, and makes it ready to parse plugin nodes.

    Raises:
        MissingHere: it is not installed, or its libraries do not load.
    """
    if name not in _loaded:
        if name == "tensorrt-rtx":
            rtx_soname.prepare()
        trt = _import(name)
        log: list[tuple[int, str]] = []
        _loaded[name] = Backend(name, trt, log, _logger(trt, log))
    return _loaded[name]


def is_installed(name: BackendName) -> bool:
    """Whether Python finds the package; it may still not load."""
    try:
        return importlib.util.find_spec(_MODULES[name]) is not None
    except ValueError:  # sys.modules holds None for it: hidden on purpose
        return False


def _import(name: BackendName) -> ModuleType:
    extra = _EXTRAS[name]
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        got = f"Python cannot import {_MODULES[name]}: {error}"
    except (OSError, RuntimeError) as error:
        got = f"{_MODULES[name]} is installed but its libraries do not load: {error}"
    raise MissingHere(
        f"{'TensorRT for RTX' if name == 'tensorrt-rtx' else 'TensorRT'} is not usable here",
        where=sys.prefix,
        got=got,
        need=f"the Python package {_MODULES[name]}",
        do=pip_install(extra),
    )


def _logger(trt: Any, log: list[tuple[int, str]]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps every message; what matters to the user is picked from the list."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= _INFO:  # verbose ones are many and hold nothing that is read here
                log.append((int(severity), message))

    return Logger()


# --- building ---------------------------------------------------------------------------------------------------------


def create_builder(backend: Backend) -> Any:
    """A builder of ``backend``.

    Raises:
        MissingHere: TensorRT finds no GPU (TensorRT for RTX needs none).
    """
    mark = len(backend.log)
    try:
        return backend.trt.Builder(backend.logger)
    except (TypeError, RuntimeError) as error:
        raise MissingHere(
            "TensorRT cannot build engines here",
            where=f"{backend.name} {backend.version}",
            got="; ".join(backend.errors_since(mark)) or str(error),
            need="an NVIDIA GPU with its driver",
            do="run this on a GPU machine, or build here with --backend tensorrt-rtx --target sm80,sm89",
        ) from error


def create_network(backend: Backend, builder: Any) -> Any:
    """An empty, strongly typed network."""
    kinds = backend.trt.NetworkDefinitionCreationFlag
    flags = 0
    for name in ("STRONGLY_TYPED", "EXPLICIT_BATCH"):  # the second is implied, and gone, in newer versions
        if name in kinds.__members__ and (name == "STRONGLY_TYPED" or "STRONGLY_TYPED" not in kinds.__members__):
            flags |= 1 << int(getattr(kinds, name))
    return builder.create_network(flags)


def parse_targets(given: Sequence[str]) -> tuple[str, ...]:
    """The names in every ``--target``, each once.

    Raises:
        UsageError: one is empty; no target at all would be all of them.
    """
    names = [name.strip().lower() for names in given for name in names.split(",")]
    if "" in names:
        raise UsageError(
            "a target has no name",
            where="--target",
            got=", ".join(map(repr, given))[:200],
            need="names of GPU generations with a comma between two, such as sm80,sm89",
            do="name the targets, or leave --target out",
        )
    return tuple(dict.fromkeys(names))


def check_targets(backend: Backend, targets: Sequence[str], served: Sequence[str]) -> None:
    """Refuses a target that is not among ``served``.

    Raises:
        UsageError: as said; a backend that builds only for the GPU at hand serves none.
    """
    unserved = [target for target in targets if target not in served]
    # 89, 8.9, sm_89 and sm8.9 are what other tools write.
    spelled = {target: "sm" + "".join(filter(str.isdigit, target)) for target in unserved}
    meant = list(spelled.values()) if spelled and set(spelled.values()) <= set(served) else []
    if unserved:
        raise UsageError(
            f"{backend.name} {backend.version} cannot build for {', '.join(unserved)}",
            where="--target",
            got=", ".join(targets),
            need=f"some of {', '.join(served)}" if served else "no --target: it builds for the GPU of this machine",
            do=f"write {', '.join(meant)}"
            if meant
            else "for another GPU build on a machine that has one, with --backend tensorrt",
        )


def set_targets(backend: Backend, config: Any, targets: Sequence[str]) -> None:
    """Asks for code for each of ``targets`` (``sm80``...); none leaves the choice to the backend."""
    if not targets:
        return
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        config.set_compute_capability(getattr(backend.trt.ComputeCapability, target.upper()), index)


def alias_outputs(backend: Backend, config: Any) -> None:
    """Lets a plugin's output be the memory of its input: a cache is written in place.

    Raises:
        MissingHere: this TensorRT cannot.
    """
    kinds = getattr(backend.trt, "PreviewFeature", None)
    feature = getattr(kinds, "ALIASED_PLUGIN_IO_10_03", None)
    if feature is not None:
        config.set_preview_feature(feature, True)
    if feature is None or not config.get_preview_feature(feature):
        raise MissingHere(
            "this TensorRT cannot write a cache in place",
            where=f"{backend.name} {backend.version}",
            got="no preview feature ALIASED_PLUGIN_IO_10_03",
            need="TensorRT 10.3 or newer, or TensorRT for RTX, whose plugins' outputs may be the memory of inputs",
            do="install a newer TensorRT, or export the model with a cache that grows: flash-export --kv-cache",
        )


def set_timing_cache(config: Any, measured: bytes) -> None:
    """Gives the build what an earlier one measured; b"" starts a new cache.

    TensorRT itself starts anew, with a warning in its log, when the cache is broken or of another version or GPU.
    """
    config.set_timing_cache(config.create_timing_cache(measured), False)


def timing_cache(config: Any) -> bytes | None:
    """What the build measured together with what it was given; None where there is no cache."""
    cache = config.get_timing_cache()
    return None if cache is None else bytes(cache.serialize())


def set_progress(backend: Backend, config: Any, progress: Progress) -> Any:
    """Reports the build's phases to ``progress(phase, done, total)``; what it returns must outlive the build."""
    if not hasattr(backend.trt, "IProgressMonitor") or not hasattr(config, "progress_monitor"):
        return None
    monitor = _progress_monitor(backend.trt, progress)
    config.progress_monitor = monitor
    return monitor


def _progress_monitor(trt: Any, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            progress(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress(phase_name, step + 1, self.steps.get(phase_name, step + 1))
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()
