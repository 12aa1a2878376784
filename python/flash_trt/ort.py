# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime with a say in where it runs, and proof of what computed the FlashAttention nodes."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime

from flash_export import runtime_defects
from flash_export.errors import MissingHere, UserError
from flash_export.op import OPERATORS
from flash_export.requirements import pip_install
from flash_trt import cpu_operator, gpu
from flash_trt.onnx_file import OnnxFile
from flash_trt.ort_errors import cannot_load, fails_on, one_line

LIBRARY = "our CPU operator library"
BODIES = "the function bodies in the file, in standard operators"

_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"


def has_cuda() -> bool:
    """Whether this ONNX Runtime has its CUDA provider, and a GPU answers."""
    return _CUDA in onnxruntime.get_available_providers() and bool(gpu.devices())


def has_library() -> bool:
    """Whether the operator library for the CPU is here.

    Raises:
        MissingHere: the environment names one that is not there.
    """
    try:
        cpu_operator.cpu_operator_path()
    except MissingHere:
        if os.environ.get(cpu_operator.VARIABLE):
            raise
        return False
    return True


def require_cuda() -> None:
    """Refuses to run on CUDA where that is not possible.

    Raises:
        MissingHere: the ONNX Runtime here has no CUDA provider, or there is no GPU.
    """
    if has_cuda():
        return
    providers = onnxruntime.get_available_providers()
    raise MissingHere(
        "ONNX Runtime cannot run on CUDA here",
        where=f"onnxruntime {onnxruntime.__version__}",
        got=f"providers {', '.join(providers)}" + ("" if _CUDA not in providers else "; no GPU answers"),
        need=f"{_CUDA} and an NVIDIA GPU",
        do=f"{pip_install('gpu')} on a machine with a GPU, or run on the CPU: --on cpu",
    )


class Session:
    """A model in ONNX Runtime, profiled, so that what ran is known and not assumed."""

    def __init__(
        self, file: OnnxFile, *, cuda: bool = False, library: bool = False, profile_into: Path | None = None
    ) -> None:
        """Loads ``file`` on the CPU, with the operator library or through the function bodies, or on CUDA.

        Raises:
            MissingHere: CUDA, or the library, is not usable here; CUDA also where its provider falls back to the CPU.
            UnsupportedModel: ONNX Runtime does not load the model.
        """
        if cuda:
            require_cuda()
        self._file, self._cuda = file, cuda
        self._profiled = profile_into is not None
        options: dict[str, Any] = {"log_severity_level": 4}
        if profile_into is not None:
            options |= {"enable_profiling": True, "profile_file_prefix": str(profile_into / "profile")}
        try:
            self._session = cpu_operator.session(file.path, **options) if library else _plain(file.path, cuda, options)
            if cuda and _CUDA not in self._session.get_providers():
                raise _not_on_cuda(self._session.get_providers())  # ONNX Runtime itself only warns, and takes the CPU
        except UserError:
            raise
        except Exception as error:  # ONNX Runtime's errors share no other base
            raise cannot_load(file.path, error) from error

    @property
    def where(self) -> str:
        """The library and the device, in words."""
        return f"ONNX Runtime {onnxruntime.__version__} on {'CUDA' if self._cuda else 'the CPU'}"

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Output name -> array.

        Raises:
            UsageError: the model fails on these inputs.
        """
        names = [output.name for output in self._session.get_outputs()]
        try:
            made = self._session.run_with_ort_values(names, {name: _to_ort(array) for name, array in feeds.items()})
            return {name: _from_ort(value) for name, value in zip(names, made, strict=True)}
        except Exception as error:
            raise fails_on(self._file.path, error) from error

    def implementation(self) -> str:
        """What computed the FlashAttention nodes of all runs so far, by ONNX Runtime's own profile; ends profiling.

        Raises:
            MissingHere: ONNX Runtime could not write the profile whole, of which it says nothing itself.
        """
        nodes = len(self._file.flash_nodes)
        if not nodes:
            return "no FlashAttention node in the model"
        if not self._profiled:
            raise ValueError("the session was opened without profile_into")
        ran = _operators_run(Path(self._session.end_profiling()))
        left = sorted({node.operator for node in self._file.flash_nodes if node.is_needed} - ran.keys())
        if not OPERATORS.keys() & ran.keys():
            return BODIES + (", on CUDA" if self._cuda else "")
        # An older library, which the environment may name, lacks operators: their bodies run beside it.
        return LIBRARY + (f"; {', '.join(left)} by {BODIES}" if left else "")


def _not_on_cuda(providers: list[str]) -> MissingHere:
    return MissingHere(
        "ONNX Runtime's CUDA provider does not load here",
        where=f"onnxruntime {onnxruntime.__version__}",
        got=f"a session on {', '.join(providers)}",
        need=f"{_CUDA}, with the CUDA and cuDNN libraries of its version",
        do="look at ONNX Runtime's warning above, or run on the CPU: --on cpu",
    )


def _plain(path: Path, cuda: bool, options: dict[str, Any]) -> onnxruntime.InferenceSession:
    settings = cpu_operator.onnx_settings()
    for name, value in options.items():
        setattr(settings, name, value)
    return onnxruntime.InferenceSession(
        str(path),
        settings,
        providers=[_CUDA, _CPU] if cuda else [_CPU],
        disabled_optimizers=runtime_defects.disabled_optimizers(path),
    )


def _to_ort(array: np.ndarray) -> onnxruntime.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:  # no NumPy type of its own
        bits = np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))


def _from_ort(value: onnxruntime.OrtValue) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    bits = (ctypes.c_uint16 * math.prod(shape)).from_address(value.data_ptr())
    array: np.ndarray = np.frombuffer(bits, np.uint16).view(ml_dtypes.bfloat16)
    return array.reshape(shape).copy()


def _operators_run(profile: Path) -> Counter[str]:
    """Operator -> how many of its nodes ran."""
    try:
        events = json.loads(profile.read_text())
    except (OSError, ValueError) as error:
        raise MissingHere(
            "ONNX Runtime's profile of the run is not whole, so what computed the attention is not known",
            where=str(profile.parent),
            got=one_line(error),
            need="room for temporary files, and a limit of files' sizes (ulimit -f) beyond the profile's",
            do="free some space there, or set TMPDIR to a folder on another disk",
        ) from error
    return Counter(event["args"]["op_name"] for event in events if "op_name" in event.get("args", {}))
