# SPDX-License-Identifier: Apache-2.0
"""The operator on a CPU: finds ONNX Runtime's library of it and opens sessions that use it.

A fused file runs in plain ONNX Runtime through its function bodies. With this library registered the nodes run in our
own kernels instead: no S x S matrix, and faster.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnxruntime

from flash_export import runtime_defects
from flash_export.errors import MissingHere, UsageError
from flash_trt import native, node_faults, onnx_file
from flash_trt.ort_errors import cannot_load, unwritten_file

LIBRARY = "libflash_attention_cpu.so"
VARIABLE = "FLASH_TRT_CPU_OPERATOR"

_RANGES: dict[str, tuple[int, float]] = {
    "intra_op_num_threads": (0, float("inf")),
    "inter_op_num_threads": (0, float("inf")),
    "log_severity_level": (-1, 4),
}
"""Options whose values ONNX Runtime does not look at, or only when the model is loaded: (smallest, largest)."""


def cpu_operator_path() -> str:
    """What ``onnxruntime.SessionOptions.register_custom_ops_library`` takes: the library, as a string.

    ``$FLASH_TRT_CPU_OPERATOR`` when set, else the installed one, else the build tree's.

    Raises:
        MissingHere: there is none; the message lists every place searched.
    """
    chosen = os.environ.get(VARIABLE)
    found = native.find(LIBRARY) if not chosen else Path(chosen) if Path(chosen).is_file() else None
    if found is not None:
        return str(found.resolve())
    raise MissingHere(
        "the operator's library for ONNX Runtime is missing",
        where=f"{VARIABLE}={chosen}" if chosen else ", ".join(map(str, native.folders())),
        got="no such file" if chosen else f"no {LIBRARY} there, and {VARIABLE} is not set",
        need=LIBRARY,
        do=f"install flash-export from a wheel or with pip install -e ., or set {VARIABLE} to the library's path",
    )


def session(path: str | Path, **options: Any) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session on the CPU whose FlashAttention nodes run in our kernels.

    Args:
        path: a model that ``flash-export`` wrote; any other that ONNX Runtime runs does too.
        options: attributes of ``onnxruntime.SessionOptions`` by name, ``intra_op_num_threads=2`` for example.

    Raises:
        UsageError: an option that ONNX Runtime does not have, or not with this value, or a file that it cannot write;
            no path, no such file, no ONNX; or a FlashAttention node whose attributes are not the operator's.
        UnsafeInput, UnsupportedModel: as ``onnx_file.require_safe``, a newer version of the operator among them;
            UnsupportedModel too where ONNX Runtime does not load the model, or the operator refuses an attribute's
            value or a tensor's type.
        MissingHere: the library is not found or does not load.
    """
    model = onnx_file.path_of(path)
    onnx_file.require_safe(model)  # ONNX Runtime passes over newer versions
    if fault := node_faults.attribute_fault(model):  # and over unknown attributes
        raise fault
    settings = onnx_settings()
    for name, value in options.items():
        if not isinstance(getattr(onnxruntime.SessionOptions, name, None), property):
            raise UsageError(
                "ONNX Runtime has no such option",
                where=f"option {name}",
                got=f"{name}={value!r}",
                need="an attribute of onnxruntime.SessionOptions",
                do="correct its name",
            )
        _set(settings, name, value)
    _register(settings)
    try:
        return onnxruntime.InferenceSession(
            str(model),
            settings,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=runtime_defects.disabled_optimizers(model),
        )
    except Exception as error:  # ONNX Runtime's errors share no other base
        optimized = settings.optimized_model_filepath
        unwritten = unwritten_file("optimized_model_filepath", optimized, error) if optimized else None
        raise unwritten or node_faults.dtype_fault(model) or cannot_load(model, error) from error


def _set(settings: onnxruntime.SessionOptions, name: str, value: object) -> None:
    default = getattr(settings, name)
    try:
        setattr(settings, name, value)
    except Exception as error:  # of another type, or outside its range
        raise _bad_value(name, value, f"a value like its default, {default!r}") from error
    if name in _RANGES:
        least, most = _RANGES[name]
        if not least <= getattr(settings, name) <= most:
            raise _bad_value(name, value, f"{least} or more" if most == float("inf") else f"{least} to {most}")


def _bad_value(name: str, value: object, need: str) -> UsageError:
    return UsageError(
        "ONNX Runtime does not take this value of an option",
        where=f"option {name}",
        got=f"{name}={value!r}"[:200],
        need=need,
        do="look the option up in onnxruntime.SessionOptions",
    )


def onnx_settings() -> onnxruntime.SessionOptions:
    """Options of a session that takes its file as ONNX: by the suffix ``.ort`` alone it would be of another format."""
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.load_model_format", "ONNX")
    return settings


def _register(settings: onnxruntime.SessionOptions) -> None:
    library = cpu_operator_path()
    try:
        settings.register_custom_ops_library(library)
    except Exception as error:
        raise MissingHere(
            "the operator's library for ONNX Runtime does not load",
            where=library,
            got=str(error),
            need=f"ONNX Runtime 1.17 or newer on this kind of processor; here it is {onnxruntime.__version__}",
            do="install a newer onnxruntime, or install flash-export again",
        ) from error
