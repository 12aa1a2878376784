# SPDX-License-Identifier: Apache-2.0
"""Everything that computes the cache forms, behind one face: why not, and run."""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from contract import cache_cases, cache_launch, emulated_library
from contract.cache_cases import CACHE_CASES, CacheCase, CacheTensors
from contract.cache_model import feeds, named, node_of
from contract.implementations import OPSET, run_in_onnxruntime
from contract.node_model import model_of
from flash_trt import cpu_operator_path

TARGET = "FLASH_TRT_CPU_TARGET"


class CacheImplementation(Protocol):
    """One implementation of the cache forms."""

    name: str

    def why_not(self, case: CacheCase) -> str:
        """Why it cannot run this case; empty: it can."""

    def run(self, tensors: CacheTensors) -> dict[str, NDArray]:
        """The node's outputs by name, in its layout and dtype. May write the caches of ``tensors``."""


class BodyInOnnxRuntime:
    """The function body in plain ONNX Runtime on the CPU, no library of ours."""

    name = "body_in_onnxruntime"

    def why_not(self, case: CacheCase) -> str:
        """It takes everything."""
        return ""

    def run(self, tensors: CacheTensors) -> dict[str, NDArray]:
        """Inlines the body and runs it."""
        return named(tensors, run_in_onnxruntime(model_of([node_of(tensors)], OPSET), feeds(tensors)))


class BodyInReferenceEvaluator:
    """The function body in onnx's own evaluator: slow numpy, an independent reading of the standard ops."""

    name = "body_in_reference_evaluator"

    def why_not(self, case: CacheCase) -> str:
        """Limits of its own."""
        if not case.capacity:
            return "its Softmax takes no empty axis"
        return "its GatherElements picks from at most 64 rows" if case.capacity + case.new > 64 else ""

    def run(self, tensors: CacheTensors) -> dict[str, NDArray]:
        """Evaluates the body node by node."""
        evaluator = ReferenceEvaluator(model_of([node_of(tensors)], OPSET))
        with np.errstate(all="ignore"):  # log(0) and (-inf) - (-inf) are part of the body
            return named(tensors, list(evaluator.run(None, feeds(tensors))))


class EmulatedKernels:
    """The CUDA kernels' own source on the CPU: the append, then the attention, in place."""

    name = "emulated_kernels"

    def why_not(self, case: CacheCase) -> str:
        """They take everything."""
        return ""

    def run(self, tensors: CacheTensors) -> dict[str, NDArray]:
        """Launches both on host buffers."""
        launch, library = cache_launch.Launch(tensors), emulated_library.load()
        library.flashAttentionAppend.argtypes = [ctypes.POINTER(emulated_library.FlashAppendArgs), ctypes.c_void_p]
        failed = library.flashAttentionAppend(ctypes.byref(launch.append), None)
        workspace = np.empty(library.flashAttentionWorkspace(ctypes.byref(launch.attention)), np.uint8)
        address = workspace.ctypes.data if workspace.size else None
        failed = failed or library.flashAttentionLaunch(ctypes.byref(launch.attention), address, None)
        if failed:
            raise RuntimeError(f"cudaError {failed}: {library.flashEmulationError().decode()}")
        return launch.outputs


class CpuOperator:
    """The operator's library in ONNX Runtime on the CPU, with the kernels of one instruction set."""

    def __init__(self, target: str) -> None:
        self.name, self._target = f"cpu_operator_{target}", target

    def why_not(self, case: CacheCase) -> str:
        """It takes everything, on a processor that has the instruction set."""
        return why_no_target(self._target)

    def run(self, tensors: CacheTensors) -> dict[str, NDArray]:
        """Runs the node without its body: nothing else could run it."""
        model = model_of([node_of(tensors)], OPSET)
        del model.functions[:]
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(TARGET, self._target)
            return named(tensors, run_in_onnxruntime(model, feeds(tensors), library=cpu_operator_path()))


@functools.cache
def why_no_target(target: str) -> str:
    """Why this processor does not run these kernels, as the library says it; empty: it does."""
    tensors = cache_cases.make(CACHE_CASES[0])
    try:
        CpuOperator(target).run(tensors)
    except Exception as error:
        if "cannot choose the kernels" not in str(error):
            raise
        return f"this processor does not run {target}"
    return ""


CACHE_IMPLEMENTATIONS: list[CacheImplementation] = [
    BodyInOnnxRuntime(),
    BodyInReferenceEvaluator(),
    EmulatedKernels(),
    *(CpuOperator(target) for target in ("plain", "avx2", "avx512")),
]
